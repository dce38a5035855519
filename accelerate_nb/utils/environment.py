"""The import path `accelerate.utils.environment`: variables, and what the machine has, under Hugging Face's module name."""

from accelerate_nb.runtime.compat.env_vars import *
from accelerate_nb.runtime.compat.packages import get_current_device_type as get_current_device_type
