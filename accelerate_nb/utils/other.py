"""The door `accelerate.utils.other`: what Hugging Face keeps in this module."""

from accelerate_nb.runtime.saving import save as save, wait_for_everyone as wait_for_everyone
from accelerate_nb.runtime.unwrapping import extract_model_from_parallel as extract_model_from_parallel
