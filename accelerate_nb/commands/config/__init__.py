"""The import path `accelerate.commands.config`: the configuration file, under Hugging Face's module name."""

from accelerate_nb.cli.hf_commands import (
    default_config_file as default_config_file,
    load_config_from_file as load_config_from_file,
)
from accelerate_nb.commands.config import config_args as config_args, default as default
