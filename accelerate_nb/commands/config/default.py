"""The import path `accelerate.commands.config.default`: a configuration file for this machine, under Hugging Face's module name."""

from accelerate_nb.runtime.compat.basic_config import write_basic_config as write_basic_config
