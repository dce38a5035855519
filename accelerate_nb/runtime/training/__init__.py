"""Optimizers, schedulers, accumulation, compilation, metrics."""
