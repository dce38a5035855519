"""The door `accelerate.local_sgd`."""

from accelerate_nb.runtime.local_sgd import LocalSGD as LocalSGD
