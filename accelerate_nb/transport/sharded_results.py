"""Tensors of a returned value that are sharded over ranks, put together by all of them."""

import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from accelerate_nb.transport.serializer import dump_homeward

# How long ranks that returned a sharded model wait for the others to return theirs.
_LONGEST_GATHER = timedelta(minutes=10)


def whole_tensors(value: Any) -> Callable[[Any], Any] | None:
    """The whole tensors, on the CPU, of a value's sharded ones; `None` where all ranks, which call it, don't share some."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or "torch.distributed.tensor" not in sys.modules or not dist.is_initialized():
        return None
    import torch
    from torch.distributed.tensor import DTensor

    found: list[DTensor] = []

    def reference(part: Any) -> int | None:
        if isinstance(part, DTensor):
            found.append(part)
        return 0 if isinstance(part, torch.Tensor) else None

    with suppress(Exception):
        dump_homeward(value, None, reference)
    store = dist.PrefixStore("accelerate_nb/returned", dist.distributed_c10d._get_default_store())
    # a group may last for several functions
    store = dist.PrefixStore(str(store.add(f"rank {dist.get_rank()}", 1)), store)
    shapes = str([(tuple(tensor.shape), tensor.placements) for tensor in found])
    store.add(shapes, 1)
    if store.add("ranks", 1) == dist.get_world_size():
        store.set("all", "")
    if not found:
        return None
    with suppress(RuntimeError):
        store.wait(["all"], _LONGEST_GATHER)
        if store.add(shapes, 0) == dist.get_world_size():
            gathered = {id(tensor): tensor.full_tensor().detach().cpu() for tensor in found}
            return lambda tensor: gathered[id(tensor)]
    return None
