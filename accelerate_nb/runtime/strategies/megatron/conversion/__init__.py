"""Models of transformers as models of megatron-core, and back."""
