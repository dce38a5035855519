"""The import path `accelerate.hooks`: what runs around a module's forward, under Hugging Face's module name."""

from accelerate_nb.big_models.hooks import (
    LayerwiseCastingHook as LayerwiseCastingHook,
    ModelHook as ModelHook,
    SequentialHook as SequentialHook,
    add_hook_to_module as add_hook_to_module,
    remove_hook_from_module as remove_hook_from_module,
    remove_hook_from_submodules as remove_hook_from_submodules,
)
from accelerate_nb.big_models.offload_hooks import (
    AlignDevicesHook as AlignDevicesHook,
    CpuOffload as CpuOffload,
    UserCpuOffloadHook as UserCpuOffloadHook,
    attach_align_device_hook as attach_align_device_hook,
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    attach_execution_device_hook as attach_execution_device_hook,
)
