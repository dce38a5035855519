"""The door `accelerate.accelerator`: the `Accelerator` under Hugging Face's module name."""

from accelerate_nb.runtime.accelerator import Accelerator as Accelerator
