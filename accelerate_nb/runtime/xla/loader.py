"""The transfer of batches to an XLA device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from accelerate_nb.devices.xla import is_installed
from accelerate_nb.errors import MissingExtraError
from accelerate_nb.runtime.operations.nested import leaves_of, placed, with_leaves
from accelerate_nb.runtime.xla.device import sync

if TYPE_CHECKING:
    from accelerate_nb.runtime.data.shard import DataLoaderShard


class MpDeviceLoaderWrapper:
    """
    A prepared loader whose batches are sent to an XLA device by a thread, one ahead of the loop.

    Each batch is read by the loop's own thread, so that where the loader stands, and whether a batch is the last, is known of
    the current batch. `MissingExtraError`, an `ImportError`, where torch_xla is not installed.
    """

    def __init__(self, dataloader: DataLoaderShard, device: Any) -> None:
        if not is_installed():
            raise MissingExtraError(
                "MpDeviceLoaderWrapper was requested, but needs torch_xla: pip install 'accelerate-nb[tpu]'"
            )
        self.dataloader = dataloader
        self.device = device
        dataloader.send_in_background(partial(sent, device=device), device, sync)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataloader)

    def __len__(self) -> int:
        return len(self.dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":  # not there yet while it is made or unpickled
            raise AttributeError(name)
        return getattr(self.dataloader, name)


def sent(batch: Any, device: Any) -> Any:
    """The batch on an XLA device, its tensors in one transfer; any thread may call it."""
    import torch_xla.core.xla_model as model

    # `to` leaves the transfer to the first operation that uses a tensor, in the middle of the loop's step, and writes single numbers
    # into the program, which is then compiled for each of them
    leaves = leaves_of(batch, records=True)
    known = [leaf for leaf in leaves if _is_known(leaf)]
    if known:
        copies = iter(model.send_cpu_data_to_device(known, device))
        batch = with_leaves(batch, iter([next(copies) if _is_known(leaf) else leaf for leaf in leaves]), records=True)
    return placed(batch, device)  # whatever else can be moved


def _is_known(leaf: Any) -> TypeGuard[Tensor]:
    """Whether a leaf is numbers in the host's memory, and no more."""
    plain = type(leaf) is Tensor and leaf.device.type == "cpu" and leaf.layout == torch.strided
    return plain and not leaf.is_nested and not leaf.requires_grad
