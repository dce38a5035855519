"""Pipelines: each process has some consecutive layers of the model, and batches pass through them in parts."""
