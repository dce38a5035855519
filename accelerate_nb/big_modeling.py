"""The door `accelerate.big_modeling`: models larger than memory, under Hugging Face's module name."""

from accelerate_nb.big_models.casting import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from accelerate_nb.big_models.dispatching import (
    cpu_offload as cpu_offload,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
)
from accelerate_nb.big_models.empty import init_empty_weights as init_empty_weights, init_on_device as init_on_device
from accelerate_nb.big_models.loading import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from accelerate_nb.big_models.taking_turns import cpu_offload_with_hook as cpu_offload_with_hook
from accelerate_nb.runtime.constants import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
)
