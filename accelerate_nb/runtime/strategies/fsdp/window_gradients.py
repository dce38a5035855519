"""The gradients of a window of accumulation that a sharded model has on this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.operations.sharded_tensors import local


def window_gradients(model: Module) -> dict[str, Tensor]:
    """This process's parts of the averaged gradients of a window; all processes call it."""
    held = {id(weight): part for weight, part in _held_parts(model)}
    found = {}
    for name, weight in model.named_parameters():
        parts = [] if weight.grad is None else [local(weight.grad)]
        parts += [held[id(weight)]] if id(weight) in held else []
        if parts:
            found[name] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
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
        weight.grad = None
        if gradient is not None:
            # beside the weight, which may wait on the host
            weight.grad = torch.empty_like(weight)
            local(weight.grad).copy_(gradient)


def _held_parts(model: Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Sharded weights with this process's part of the average of the whole gradients that processes have kept to themselves."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for weight in _weights_of(module._get_fsdp_state()):
            gradient = weight.unsharded_accumulated_grad
            if gradient is None and hasattr(weight, "_unsharded_param"):
                gradient = weight._unsharded_param.grad
            if gradient is not None:
                own = local(gradient).to(weight.sharded_param.dtype)
                yield weight.sharded_param, _part(_averaged(own, weight.mesh_info), weight)


def _averaged(gradient: Tensor, mesh: Any) -> Tensor:
    """The mean over the processes that shard a weight, and over copies of these; not over those that split its layer."""
    average = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(average, group=mesh.shard_process_group)
    copies = getattr(mesh, "replicate_mesh_size", 1)
    if copies > 1:
        dist.all_reduce(average, group=mesh.replicate_process_group)
    return average.div_(mesh.shard_mesh_size * copies)


def _part(whole: Tensor, weight: Any) -> Tensor:
    """The part that torch gives this process of a weight, or an empty one."""
    dim, rank = weight.fsdp_placement.dim, weight.mesh_info.shard_mesh_rank
    parts = whole.chunk(weight.mesh_info.shard_mesh_size, dim)
    return parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)


def _weights_of(state: Any) -> list[Any]:
    # torch 2.13 and later have several groups a module, earlier ones one
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    return [weight for group in groups if group is not None for weight in group.fsdp_params]
