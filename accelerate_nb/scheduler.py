"""The door `accelerate.scheduler`: prepared schedules under Hugging Face's module name."""

from accelerate_nb.runtime.scheduler import AcceleratedScheduler as AcceleratedScheduler
