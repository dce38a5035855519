"""The import path `accelerate.inference`: pipelines under Hugging Face's module name."""

from accelerate_nb.runtime.compat.unsupported.pipeline import (
    build_pipeline as build_pipeline,
    find_pippy_batch_size as find_pippy_batch_size,
    generate_device_map as generate_device_map,
    pippy_forward as pippy_forward,
    prepare_pippy as prepare_pippy,
)
