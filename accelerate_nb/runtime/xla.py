"""What this rank does through torch_xla: its place, its device, and when what was asked of the device is done."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accelerate_nb.devices import xla as machine


def is_asked(environment: Mapping[str, str]) -> bool:
    """Whether this environment is that of a process which computes through torch_xla."""
    return bool(environment.get("PJRT_DEVICE")) and machine.is_installed()


def device_type() -> str:
    """The kind of device that torch_xla computes on: "TPU", "CUDA", "CPU"."""
    import torch_xla.runtime

    return str(torch_xla.runtime.device_type())


def device() -> torch.device:
    """This rank's device; the runtime wakes."""
    import torch_xla

    machine.wake(int(os.environ.get("LOCAL_RANK") or 0), int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    found: torch.device = torch_xla.device()
    return found


def place() -> tuple[int, int, int, int]:
    """This rank among all and how many there are, this rank on its machine and how many are there."""
    from torch_xla import runtime

    if runtime.is_spmd():
        return runtime.process_index(), runtime.process_count(), 0, 1
    local = runtime.local_process_count() * runtime.addressable_device_count()
    return runtime.global_ordinal(), runtime.world_size(), runtime.local_ordinal(), local


def sync() -> None:
    """Have the device compute what was asked of it so far; returns before it has, in the same order on all ranks."""
    import torch_xla

    torch_xla.sync()


def average_in_place(tensors: Sequence[Tensor]) -> None:
    """Put the mean over all ranks in the place of each tensor, when the device comes to it; all ranks call it."""
    import torch_xla.core.xla_model as model
    from torch_xla import runtime

    if tensors and (size := runtime.world_size()) > 1:
        model.all_reduce(model.REDUCE_SUM, list(tensors), scale=1.0 / size, pin_layout=False)


def to_cpu(data: Any) -> Any:
    """The same nest of lists, tuples and dictionaries with copies of its tensors on the CPU, brought in one transfer."""
    import torch_xla.core.xla_model as model

    return model._maybe_convert_to_cpu(data)
