"""The import path `accelerate.hooks`: what runs around a module's forward, under Hugging Face's module name."""

from accelerate_nb.big_models.hooks.align_devices import (
    AlignDevicesHook as AlignDevicesHook,
    attach_align_device_hook as attach_align_device_hook,
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    attach_execution_device_hook as attach_execution_device_hook,
)
from accelerate_nb.big_models.hooks.base import (
    ModelHook as ModelHook,
    SequentialHook as SequentialHook,
    add_hook_to_module as add_hook_to_module,
    remove_hook_from_module as remove_hook_from_module,
    remove_hook_from_submodules as remove_hook_from_submodules,
)
from accelerate_nb.big_models.hooks.cpu_offload import (
    CpuOffload as CpuOffload,
    UserCpuOffloadHook as UserCpuOffloadHook,
)
from accelerate_nb.big_models.hooks.layerwise_casting import LayerwiseCastingHook as LayerwiseCastingHook
