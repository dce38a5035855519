"""The rest of an epoch after its first batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate_nb.runtime.data.adapter import DataLoaderAdapter, DataLoaderStateMixin, loader_arguments
from accelerate_nb.runtime.data.prepared_loader import PreparedLoader, SequenceLoader
from accelerate_nb.runtime.training.accumulation import GradientState


class SkipBatchSampler(BatchSampler):
    """A batch sampler without the first `skip_batches` batches of another."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not there yet while it is unpickled
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)  # its size, its sampler: all but the beginning is the other's

    @property
    def total_length(self) -> int:
        """The number of batches with those that are skipped."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        yield from islice(self.batch_sampler, self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A torch loader that reads its first `skip_batches` batches and leaves them out, for what has no indices."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own class of iterators
        self.begin()
        try:
            yield from islice(super().__iter__(), self.skip_batches, None)
        finally:
            self.end()

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """
    The loader without its first batches, without loading them where samples have indices.

    Of a prepared loader it is the rest of the current epoch, after which the loader itself is in the next one.

    >>> from torch.utils.data import DataLoader
    >>> list(skip_first_batches(DataLoader(range(6), batch_size=2), 2))
    [tensor([4, 5])]
    """
    if isinstance(dataloader, SequenceLoader):
        batches, parts = divmod(num_batches, dataloader.processes)
        return dataloader.after(skip_first_batches(dataloader.loader, batches), parts)
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    arguments = loader_arguments(dataloader)
    if isinstance(dataloader.dataset, IterableDataset):
        size = {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
        return SkipDataLoader(dataloader.dataset, skip_batches=num_batches, **size, **arguments)
    if dataloader.batch_sampler is not None:
        batch_sampler = SkipBatchSampler(dataloader.batch_sampler, num_batches)
        return DataLoader(dataloader.dataset, batch_sampler=batch_sampler, **arguments)
    # without batches, a sampler's own elements are what is skipped
    sampler = SkipBatchSampler(dataloader.sampler, num_batches)
    return DataLoader(dataloader.dataset, sampler=sampler, batch_size=None, **arguments)
