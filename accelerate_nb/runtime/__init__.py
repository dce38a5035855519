"""The worker side: the Accelerator."""
