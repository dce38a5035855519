"""The door `accelerate.utils.tqdm`: a progress bar on one process, under Hugging Face's module name."""

from accelerate_nb.runtime.progress import tqdm as tqdm
