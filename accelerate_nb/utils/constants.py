"""The import path `accelerate.utils.constants`: fixed words under Hugging Face's module name."""

from accelerate_nb.runtime.checkpoints.file_names import *
from accelerate_nb.runtime.compat.constants import *
