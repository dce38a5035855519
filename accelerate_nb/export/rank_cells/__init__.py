"""`%%accelerate` cells as plain Python."""
