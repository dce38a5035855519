"""The door `accelerate.optimizer`: prepared optimizers under Hugging Face's module name."""

from accelerate_nb.runtime.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
