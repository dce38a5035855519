"""The import path `accelerate.optimizer`: prepared optimizers under Hugging Face's module name."""

from accelerate_nb.runtime.training.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
