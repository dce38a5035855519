"""The door `accelerate.parallelism_config`: how a model is split, under Hugging Face's module name."""

from accelerate_nb.runtime.later.parallelism import ParallelismConfig as ParallelismConfig
