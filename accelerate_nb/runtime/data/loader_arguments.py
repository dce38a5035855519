"""The arguments of a loader, besides its data and their order."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def loader_arguments(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments for a loader that loads in the same way: with the same workers, into the same memory."""
    arguments = {name: getattr(dataloader, name) for name in _KEPT if hasattr(dataloader, name)}
    if dataloader.pin_memory_device:
        arguments["pin_memory_device"] = dataloader.pin_memory_device
    return arguments
