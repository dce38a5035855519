"""The import path `accelerate.utils.launch`: what a script can touch of launching, under Hugging Face's module name."""

from accelerate_nb.runtime.compat.constants import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate_nb.runtime.compat.env_vars import env_var_path_add as env_var_path_add
from accelerate_nb.runtime.world.state import PrepareForLaunch as PrepareForLaunch
