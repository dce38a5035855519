"""The door `accelerate.utils.launch`: what a script can touch of launching, under Hugging Face's module name."""

from accelerate_nb.runtime.constants import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate_nb.runtime.starting import PrepareForLaunch as PrepareForLaunch
from accelerate_nb.runtime.variables import env_var_path_add as env_var_path_add
