"""What each process does with its parts of tensors that are sharded."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor; a tensor that is whole is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; all processes of its mesh call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    # a part that waits on the host is exchanged by the devices: NCCL knows no other
    found: Any = as_part(tensor.to_local().to(tensor.device_mesh.device_type), tensor)
    complete: Tensor = found.full_tensor()
    return complete


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this process has of another one, sharded as that is; nothing is sent."""
    tensor = tensor.to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def as_part(part: Tensor, like: Tensor) -> Tensor:
    """This process's part as the tensor that all processes' parts make, sharded as another one is."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def step_by_weight(optimizer: Optimizer) -> None:
    """Have an optimizer step weight by weight where some of a group are whole and others parts over some mesh."""
    # torch steps over lists of weights by default on GPUs, and its operations on lists take weights of one mesh
    for group in optimizer.param_groups:
        meshes = {getattr(weight, "device_mesh", None) for weight in group["params"]}
        if len(meshes) > 1 and "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = False


def norm(gradients: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of all gradients, whole or parts over meshes, equal on all processes: (Σ |g|^p)^(1/p), for p = ∞ the largest |g|."""
    # one sum is exchanged for each way in which parts lie on processes: a mesh with the placement along each of its axes
    by_layout: dict[tuple[Any, tuple[Any, ...]], list[Tensor]] = {}
    for gradient in gradients:
        layout = (gradient.device_mesh, tuple(gradient.placements)) if isinstance(gradient, DTensor) else (None, ())
        by_layout.setdefault(layout, []).append(local(gradient))
    largest, parts = norm_type == float("inf"), []
    for (mesh, placements), tensors in by_layout.items():
        part = torch.zeros((), device=device)
        if by_device := _by_device(tensor for tensor in tensors if tensor.numel()):
            numbers = [torch._foreach_norm(found, norm_type) for found in by_device.values()]
            # one copy for all parts that wait on the host
            norms = torch.cat([torch.stack([n.to(torch.float32) for n in found]).to(device) for found in numbers])
            # the sum of the powers of this process's numbers, or the largest of them
            part = norms.max() if largest else (norms**norm_type).sum()
        for axis, placement in enumerate(placements):
            if not isinstance(placement, Replicate):
                dist.all_reduce(part, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=mesh.get_group(axis))
        parts.append(part)
    if not parts:
        return torch.zeros((), device=device)
    together = torch.stack(parts)
    return together.max() if largest else together.sum() ** (1 / norm_type)


def _by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found


def scale(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a number, in place."""
    for device, tensors in _by_device(map(local, gradients)).items():
        torch._foreach_mul_(tensors, factor.to(device))
