"""Accelerate's engine of Megatron-LM: a model of megatron-core that is built by the configuration of a transformers model."""
