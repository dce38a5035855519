"""The import path `accelerate.commands.launch`: a launch by its command line, under Hugging Face's module name."""

from accelerate_nb.cli.hf_commands import (
    launch_command as launch_command,
    launch_command_parser as launch_command_parser,
)
