"""The import path `accelerate.parallelism_config`: how a model is split, under Hugging Face's module name."""

from accelerate_nb.runtime.parallelism_config import ParallelismConfig as ParallelismConfig
