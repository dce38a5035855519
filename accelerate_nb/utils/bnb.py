"""The import path `accelerate.utils.bnb`: bitsandbytes, under Hugging Face's module name."""

from accelerate_nb.big_models.bnb import has_4bit_bnb_layers as has_4bit_bnb_layers
from accelerate_nb.runtime.compat.unsupported import load_and_quantize_model as load_and_quantize_model
