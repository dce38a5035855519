"""The import path `accelerate.utils.tqdm`: a progress bar on one process, under Hugging Face's module name."""

from accelerate_nb.runtime.observability.progress import tqdm as tqdm
