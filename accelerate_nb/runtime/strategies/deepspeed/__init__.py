"""Training with DeepSpeed: its settings under Accelerate's names, and the strategy that runs its engine."""
