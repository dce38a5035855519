"""The gradients of a window of accumulation that a sharded model has on this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.operations.sharded_tensors import as_part, local, part_of


def window_gradients(model: Module) -> dict[str, Tensor]:
    """This process's parts of the averaged gradients of a window; all processes call it."""
    held = {id(weight): gradient for weight, gradient in _held_gradients(model)}
    found = {}
    for name, weight in model.named_parameters():
        gradient = weight.grad
        if id(weight) in held:
            part = part_of(held[id(weight)], weight)
            gradient = part if gradient is None else gradient + part
        if gradient is not None:
            found[name] = local(gradient)
    return found


def set_window_gradients(model: Module, saved: Mapping[str, Tensor]) -> None:
    """Have these parts of gradients, and no others."""
    for name, weight in model.named_parameters():
        gradient = saved.get(name)
        if gradient is not None and gradient.shape != local(weight).shape:
            raise CheckpointError(
                f"The checkpoint holds the gradients of a window of accumulation by another number of processes: {name} has "
                f"{tuple(gradient.shape)} there, and {tuple(local(weight).shape)} here. Load it with as many, or save at a "
                "window's end."
            )
        weight.grad = None if gradient is None else as_part(gradient.to(weight.device), weight)


def _held_gradients(model: Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Sharded weights with the average of the whole gradients that processes have kept to themselves."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for weight in _weights_of(module._get_fsdp_state()):
            gradient = weight.unsharded_accumulated_grad
            if gradient is None and hasattr(weight, "_unsharded_param"):
                gradient = weight._unsharded_param.grad
            if gradient is not None:
                mesh = weight.sharded_param.device_mesh
                average = local(gradient).clone()
                for axis in range(mesh.ndim):
                    dist.all_reduce(average, group=mesh.get_group(axis))
                yield weight.sharded_param, average / mesh.size()


def _weights_of(state: Any) -> list[Any]:
    # torch 2.13 and later have several groups a module, earlier ones one
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    return [weight for group in groups if group is not None for weight in group.fsdp_params]
