"""A prepared loader whose batches reach an XLA device in the background."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate_nb.errors import MissingExtraError
from accelerate_nb.runtime.data.shard import DataLoaderShard
from accelerate_nb.runtime.seeds import synchronize_rng_states


class MpDeviceLoaderWrapper:
    """
    A prepared loader, read by torch_xla's threads; `MissingExtraError`, an `ImportError`, where torch_xla is not installed.

    The threads must not touch the device themselves, so random states are synchronised here, before they begin.
    """

    def __init__(self, dataloader: DataLoaderShard, device: Any) -> None:
        try:
            from torch_xla.distributed.parallel_loader import MpDeviceLoader
        except ImportError:
            raise MissingExtraError(
                "MpDeviceLoaderWrapper was asked for, but needs torch_xla: pip install 'accelerate-nb[tpu]'"
            ) from None
        self.dataloader = dataloader
        self.device = device
        self._rng_types, dataloader.rng_types = dataloader.rng_types, None
        self._loader = MpDeviceLoader(dataloader, device)

    def __iter__(self) -> Iterator[Any]:
        synchronize_rng_states(self._rng_types or [], self.dataloader.synchronized_generator)
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self.dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":  # not there yet while it is made or unpickled
            raise AttributeError(name)
        return getattr(self.dataloader, name)
