"""The import path `accelerate.accelerator`: the `Accelerator` under Hugging Face's module name, with what is imported beside it."""

from accelerate_nb.runtime.accelerator.accelerator import Accelerator as Accelerator
from accelerate_nb.runtime.compat.dataclasses import (
    DataLoaderConfiguration as DataLoaderConfiguration,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    ProjectConfiguration as ProjectConfiguration,
)
