"""The import path `accelerate.scheduler`: prepared schedules under Hugging Face's module name."""

from accelerate_nb.runtime.training.scheduler import AcceleratedScheduler as AcceleratedScheduler
