"""The import path `accelerate.scheduler`: prepared schedules under Hugging Face's module name."""

from accelerate_nb.runtime.training.optimizer import AcceleratedScheduler as AcceleratedScheduler
