"""The import path `accelerate.big_modeling`: models larger than memory, under Hugging Face's module name."""

from accelerate_nb.big_models.dispatch import (
    cpu_offload as cpu_offload,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
)
from accelerate_nb.big_models.empty import init_empty_weights as init_empty_weights, init_on_device as init_on_device
from accelerate_nb.big_models.hooks import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from accelerate_nb.big_models.load_checkpoint import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from accelerate_nb.big_models.offload_hooks import cpu_offload_with_hook as cpu_offload_with_hook
from accelerate_nb.runtime.compat.constants import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
)
