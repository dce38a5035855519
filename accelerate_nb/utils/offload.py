"""The import path `accelerate.utils.offload`: weights in files, under Hugging Face's module name."""

from accelerate_nb.big_models.offload import *
