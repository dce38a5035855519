"""The import path `accelerate.hooks`: what runs around a module's forward, under Hugging Face's module name."""

from accelerate_nb.big_models.hooks import *
from accelerate_nb.big_models.offload_hooks import *
