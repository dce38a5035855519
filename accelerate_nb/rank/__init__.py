"""The small border between a worker process and the Accelerator in it."""
