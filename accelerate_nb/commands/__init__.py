"""The import path `accelerate.commands`: what others import of the command line, under Hugging Face's module names."""

from accelerate_nb.commands import config as config
