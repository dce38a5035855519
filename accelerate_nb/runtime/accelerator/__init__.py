"""The `Accelerator` class, by topic."""
