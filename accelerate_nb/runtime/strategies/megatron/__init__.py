"""Training by Megatron-LM's own package, megatron-core."""
