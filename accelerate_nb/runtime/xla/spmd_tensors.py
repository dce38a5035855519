"""The calls of torch_xla for devices that one process drives as one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import LaunchError, NotYetError
from accelerate_nb.runtime.xla.mesh_plan import Layout


def begin(mesh: str) -> None:
    """
    Have torch_xla drive all devices as one (`use_spmd`); it must not have woken for single devices yet.

    `mesh` is the requested one, for the text of the `LaunchError`.
    """
    import torch_xla
    from torch_xla import runtime

    if os.environ["TF_CPP_MIN_LOG_LEVEL"] == "1":  # which torch_xla has set
        # each program that is compiled warns otherwise that a part of XLA is going to be replaced
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    if runtime.is_spmd():
        return
    if torch_xla._XLAC._xla_get_spmd_config_is_locked():
        raise LaunchError(
            f"The mesh {mesh!r} was requested, but torch_xla's runtime is awake in this process and drives its devices one by "
            f"one. Set it before anything touches a device: launch(..., xla_mesh={mesh!r}), or restart the process, and make "
            "the Accelerator first."
        )
    runtime.use_spmd()


def count() -> int:
    """The number of devices for a mesh; `NotYetError` where other processes drive some of them."""
    from torch_xla import runtime

    if runtime.process_count() > 1:
        raise NotYetError(
            f"A mesh over {runtime.process_count()} machines is not offered yet. Use one machine, or leave xla_mesh out."
        )
    return int(runtime.global_runtime_device_count())


def make_mesh(sizes: Mapping[str, int]) -> Any:
    """torch_xla's mesh of all devices, which becomes its global one, so that code of others finds it."""
    from torch_xla.distributed import spmd

    mesh = spmd.Mesh(np.arange(count()), tuple(sizes.values()), tuple(sizes))
    spmd.set_global_mesh(mesh)
    return mesh


def set_layout(tensor: Tensor, mesh: Any, layout: Layout) -> None:
    """Give a tensor this layout on the devices of a mesh from now on."""
    from torch_xla.distributed import spmd

    spmd.mark_sharding(tensor, mesh, layout)


def laid_out(tensor: Tensor, mesh: Any, layout: Layout) -> Tensor:
    """The same numbers in this layout, and their gradient too."""
    from torch_xla.distributed import spmd

    marked: Tensor = spmd.xla_sharding.mark_sharding_with_gradients(tensor, mesh, layout)
    return marked


def shard_like(tensor: Tensor, other: Tensor) -> None:
    """Give a tensor the layout of another one of its shape."""
    import torch_xla

    if not is_laid(tensor) and (layout := torch_xla._XLAC._get_xla_op_sharding(other)) is not None:
        torch_xla._XLAC._xla_mark_sharding(tensor, layout)


def is_on() -> bool:
    """Whether torch_xla drives all devices as one."""
    from torch_xla import runtime

    return bool(runtime.is_spmd())


def is_laid(tensor: Tensor) -> bool:
    """Whether this tensor has a layout."""
    import torch_xla

    return bool(torch_xla._XLAC._get_xla_sharding_spec(tensor))


def sent(tensors: Sequence[Tensor], device: Any, mesh: Any, layouts: Sequence[Layout]) -> list[Tensor]:
    """Tensors of the CPU on the devices, each device with its part alone."""
    import torch_xla
    from torch_xla.distributed.spmd import ShardingSpec

    specs = [
        ShardingSpec(mesh, layout).xla_spec(tensor) if layout else None
        for tensor, layout in zip(tensors, layouts, strict=True)
    ]
    found: list[Tensor] = torch_xla._XLAC._xla_tensors_from_aten(list(tensors), [str(device)] * len(tensors), specs)
    return found


def parts_of(tensor: Tensor) -> list[tuple[int, ...]]:
    """The shapes of the parts of a tensor that the devices hold, in their order; none where it has no layout."""
    return [tuple(part.shape) for part, _ in _parts([tensor])[0]] if is_laid(tensor) else []


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """
    Copies of tensors of XLA devices on the CPU, brought in one transfer; those that are cut are put together there.

    `Tensor.cpu` would have each device put all parts together before, by a program that is compiled for each shape.
    """
    if not tensors:
        return []
    import torch_xla

    cut = [is_on() and is_cut(item) for item in tensors]
    in_parts = [item.detach() for item, is_in_parts in zip(tensors, cut, strict=True) if is_in_parts]
    joined = iter([_joined(tensor, parts) for tensor, parts in zip(in_parts, _parts(in_parts), strict=True)])
    rest = [item.detach() for item, is_in_parts in zip(tensors, cut, strict=True) if not is_in_parts]
    brought = iter(torch_xla._XLAC._xla_get_cpu_tensors(rest) if rest else [])
    return [next(joined if is_in_parts else brought) for is_in_parts in cut]


def is_cut(tensor: Tensor) -> bool:
    """Whether devices have different parts of this tensor."""
    import torch_xla

    return torch_xla._XLAC._get_xla_sharding_spec(tensor) not in ("", "{replicated}", "{maximal device=0}")


def _parts(tensors: Sequence[Tensor]) -> list[list[tuple[Tensor, Any]]]:
    """The parts of each tensor on the CPU, with where they are in it."""
    import torch_xla
    import torch_xla.core.xla_model as model

    if not tensors:
        return []
    model.wait_device_ops()
    extension = torch_xla._XLAC
    parts = extension._get_local_shards(list(tensors))
    indices = extension._get_local_shard_replica_and_indices(list(tensors))
    return [
        [(part, location) for (part, _), (_, location) in zip(item, locations, strict=True)]
        for item, locations in zip(parts, indices, strict=True)
    ]


def _joined(tensor: Tensor, parts: Sequence[tuple[Tensor, Any]]) -> Tensor:
    joined = torch.empty(tensor.shape, dtype=tensor.dtype)
    for part, location in parts:
        # what a device has beyond the tensor's end fills it up to the length of the others' parts
        joined[tuple(location)] = part[tuple(slice(0, item.stop - item.start) for item in location)]
    return joined


def recompute(modules: Iterable[Module]) -> None:
    """Have these modules forget what they compute between input and output, and compute it again in the backward."""
    from torch_xla.utils.checkpoint import checkpoint

    for module in modules:
        module.forward = partial(_recomputed, checkpoint, module.forward)


def _recomputed(checkpoint: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(forward, **kwargs), *args) if torch.is_grad_enabled() else forward(*args, **kwargs)
