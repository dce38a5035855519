"""Plain data that crosses between the kernel, the supervisor and the workers."""
