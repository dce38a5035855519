"""DeepSpeed's configuration: Accelerate's plugin, and the values in the place of "auto"."""
