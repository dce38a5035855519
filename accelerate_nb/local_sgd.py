"""The import path `accelerate.local_sgd`."""

from accelerate_nb.runtime.training.local_sgd import LocalSGD as LocalSGD
