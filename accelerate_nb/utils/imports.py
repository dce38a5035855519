"""The import path `accelerate.utils.imports`: what is installed, and what torch can use, under Hugging Face's module name."""

from accelerate_nb.runtime.compat.packages import *
from accelerate_nb.runtime.strategies.deepspeed.plugin import deepspeed_required as deepspeed_required
