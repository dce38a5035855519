"""The door `accelerate.launchers`: the launchers under Hugging Face's module name."""

from accelerate_nb.notebook.functions import (
    debug_launcher as debug_launcher,
    notebook_launcher as notebook_launcher,
)
