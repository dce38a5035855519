"""The import path `accelerate.inference`: pipelines under Hugging Face's module name."""

from accelerate_nb.big_models.device_map import generate_device_map as generate_device_map
from accelerate_nb.runtime.compat.unsupported import build_pipeline as build_pipeline, pippy_forward as pippy_forward
from accelerate_nb.runtime.strategies.pipeline.strategy import (
    find_pippy_batch_size as find_pippy_batch_size,
    prepare_pippy as prepare_pippy,
)
