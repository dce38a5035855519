"""A loader whose batches are cut along their sequences, for the processes of a group, each of which reads others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

from torch.utils.data import DataLoader

from accelerate_nb.runtime.data.prepared_loader import PreparedLoader
from accelerate_nb.runtime.operations import collective
from accelerate_nb.runtime.operations.nested import placed


class SequenceLoader:
    """
    This process's part of a batch of each process of a group along `sp`, one after the other, for every batch of a loader.

    It is as many times as long as the loader as the group has processes, which all read it. The rest is the loader's.
    """

    def __init__(self, loader: DataLoader[Any], cut: Callable[[Any], Any], processes: int, device: Any) -> None:
        self.loader = loader
        self.processes = processes
        self._cut, self._device = cut, device
        # how many of the first parts are left out
        self._skip = 0

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(0, len(self.loader) * self.processes - self._skip)

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self.loader
        skip = self._skip
        for batch in loader:
            is_last = getattr(loader, "end_of_dataloader", False)
            batches = collective.gather_object([placed(batch, "cpu")], axis="sp")
            for index, whole in enumerate(batches[skip:], skip + 1):
                # a window of accumulation ends with the last part, not with the last batch
                loader.end_of_dataloader = is_last and index == self.processes
                yield self._cut(placed(whole, self._device))
            skip = 0

    def after(self, loader: DataLoader[Any], parts: int) -> SequenceLoader:
        """The same of the rest of the loader, without so many of the first parts."""
        rest = copy(self)
        rest.loader, rest._skip = loader, parts
        return rest


def cut_for_group(loader: Any, cut: Callable[[Any], Any] | None, processes: int, device: Any) -> Any:
    """A loader of whole sequences with its sequences cut for a group of so many; anything else as it is."""
    is_cut = isinstance(loader, PreparedLoader) and loader.cut is not None
    if cut is None or processes == 1 or is_cut or not isinstance(loader, DataLoader):
        return loader
    return SequenceLoader(loader, cut, processes, device)
