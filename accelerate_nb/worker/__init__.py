"""The worker process around the ranks."""
