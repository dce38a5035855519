"""The state dict of a model whose weights are elsewhere."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor
from torch.nn import Module

from accelerate_nb.big_models.devices import Device
from accelerate_nb.big_models.hooks.align_devices import align_module_device, has_offloaded_params, offloading_hook
from accelerate_nb.big_models.tensors import named_module_tensors

logger = logging.getLogger("accelerate_nb.utils.modeling")


def get_state_dict_offloaded_model(model: Module) -> dict[str, Any]:
    """All weights of a model on the CPU, those that are offloaded too, under the names of its state dict."""
    state = dict(model.state_dict())
    for path, module in model.named_modules(remove_duplicate=False):
        if has_offloaded_params(module):
            state.update({name: item for name, item in _brought(path, module).items() if name in state})
    lost = [name for name, item in state.items() if isinstance(item, Tensor) and item.is_meta]
    if lost:
        logger.warning("The following tensors were not saved because they were still on meta device: %s", lost)
    return {name: item.cpu() if isinstance(item, Tensor) else item for name, item in state.items() if name not in lost}


def _brought(path: str, module: Module) -> dict[str, Tensor]:
    prefix = f"{path}." if path else ""
    with align_module_device(module, "cpu"):
        tensors = list(named_module_tensors(module, recurse=bool(offloading_hook(module).place_submodules)))
    return {f"{prefix}{name}": tensor.detach() for name, tensor in tensors if not tensor.is_meta}


def get_state_dict_from_offload(
    module: Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Device | None = "cpu"
) -> dict[str, Any]:
    """The given state dict, with the weights of the module that the parameter `module_name` belongs to filled in."""
    root = module_name.rpartition(".")[0]
    device = device_to_put_offload if has_offloaded_params(module) else None
    with align_module_device(module, device):
        for name, tensor in module.state_dict().items():
            if f"{root}.{name}" in state_dict:
                state_dict[f"{root}.{name}"] = tensor
    return state_dict
