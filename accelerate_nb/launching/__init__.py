"""The kernel side: it plans, starts and follows workers."""
