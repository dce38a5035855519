"""The import path `accelerate.launchers`: the launchers under Hugging Face's module name."""

from accelerate_nb.notebook.api import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
from accelerate_nb.runtime.compat.constants import (
    ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION as ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION,
)
from accelerate_nb.runtime.world.state import test_launch as test_launch
