"""The import path `accelerate.utils.ao`."""

from accelerate_nb.runtime.precision.fp8 import *
