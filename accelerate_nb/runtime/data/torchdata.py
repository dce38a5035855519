"""Prepared loaders that are torchdata's `StatefulDataLoader` as well."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate_nb.errors import MissingExtraError
from accelerate_nb.runtime.data.adapter import DataLoaderAdapter
from accelerate_nb.runtime.data.dispatcher import DataLoaderDispatcher
from accelerate_nb.runtime.data.prepared_loader import PreparedLoader, SkipDataLoader
from accelerate_nb.runtime.data.shard import DataLoaderShard
from accelerate_nb.runtime.data.sharding import IndexSource, with_last
from accelerate_nb.runtime.world.registry import current_world

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler
except ImportError:
    raise MissingExtraError(
        "use_stateful_dataloader=True needs torchdata, which is not installed: pip install 'accelerate-nb[torchdata]'"
    ) from None

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelerate_nb.runtime.data.dispatcher import BatchMessage, BatchTransfer
    from accelerate_nb.runtime.data.shard import BatchCopier

# The state of a sampler or a data set that keeps one is torchdata's business. What torchdata can't know, the generators and the
# epoch on which the order depends, travels beside it under this key, which torchdata leaves alone.
_POSITION = "position"
_FINISHED = "_iterator_finished"


class StatefulLoader(PreparedLoader, StatefulDataLoader):  # type: ignore[misc]  # torchdata has no types
    """A prepared loader that torchdata reads, with its state as it was when the current batch was read."""

    _at_hand: dict[str, Any] | None = None
    next_iter_state: dict[str, Any] | None

    def _index_source(self) -> IndexSource | None:
        return None if self._order_is_known() else super()._index_source()

    def _order_is_known(self) -> bool:
        """Whether torchdata reads the position from the sampler itself."""
        sampler = DataLoader._index_sampler.fget(self)  # type: ignore[attr-defined]  # torch's own, whatever we put before it
        return isinstance(sampler, StatefulBatchSampler) or hasattr(sampler, "state_dict")

    @property
    def _running(self) -> bool:
        return False  # what workers drew is in torchdata's own state

    def _begun(self) -> Iterator[Any]:
        if self.next_iter_state is not None and self.next_iter_state.get(_FINISHED):
            # torchdata's iterator of an epoch that is at its end, which it makes before the next one's, is to draw nothing
            current = self._states()
            StatefulDataLoader.state_dict(self)
            torch.set_rng_state(current["random"])
            for name, generator in self._generators().items():
                generator.set_state(current["generators"][name])
        return super()._begun()

    def skipping(self, batches: int) -> PreparedLoader:
        twin = super().skipping(batches)
        twin._whole = None  # torchdata keeps the state of the loader that is read
        return twin

    def _to_skip(self, done: int) -> int:
        self._at_hand = None
        if self.skip_batches:
            self.next_iter_state = None
        return done if self.next_iter_state is None else 0

    def _given_before(self, batches: Any) -> int:
        return int(batches._num_yielded)

    def _ahead(self, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        def with_state() -> Iterator[tuple[Any, dict[str, Any]]]:
            for batch in batches:
                yield batch, StatefulDataLoader.state_dict(self)

        for (batch, state), is_last in with_last(with_state()):
            self._at_hand = StatefulDataLoader.state_dict(self) if is_last else state
            yield batch, is_last

    def state_dict(self) -> dict[str, Any]:
        """The state of torchdata at the current batch, with the loader's position where an order depends on it."""
        state = dict(self._at_hand or self._current_state())
        state[_FINISHED] = self.end_of_dataloader or state[_FINISHED]
        if isinstance(self.dataset, IterableDataset) or not self._order_is_known():
            inside = self._course.start is not None or state[_FINISHED]
            state[_POSITION] = super().position() if inside else {**super().position(), **self._course.left}
        return state

    def _current_state(self) -> dict[str, Any]:
        state: dict[str, Any] = StatefulDataLoader.state_dict(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration goes on where `state_dict` was taken, also where it is Accelerate's."""
        torchdata_state = {name: state for name, state in state_dict.items() if name != _POSITION}
        if _POSITION in state_dict:
            super().resume({**state_dict[_POSITION], "torchdata": torchdata_state})
        self._load(torchdata_state)

    def position(self) -> dict[str, Any]:
        position = super().position()
        if self._course.start is None or self._course.at_end or self._course.pending is not None:
            return position
        state = self.state_dict()
        state.pop(_POSITION, None)
        return {**position, "torchdata": state}

    def resume(self, position: dict[str, Any]) -> None:
        super().resume(position)
        if "torchdata" in position and position["stride"] == self.stride:
            self._load(position["torchdata"])

    def _load(self, state: dict[str, Any]) -> None:
        self._at_hand = None
        StatefulDataLoader.load_state_dict(self, state)

    def set_epoch(self, epoch: int) -> None:
        pending = self._course.pending
        super().set_epoch(epoch)
        if pending is not None and self._course.pending is None:
            self.next_iter_state = None


class StatefulAdapter(DataLoaderAdapter, StatefulDataLoader):  # type: ignore[misc]  # torchdata has no types
    """A torch loader that torchdata reads."""


class StatefulSkip(SkipDataLoader, StatefulDataLoader):  # type: ignore[misc]  # torchdata has no types
    """A loader without its first batches, which torchdata reads."""


class StatefulShard(StatefulLoader, DataLoaderShard):
    """A loader whose every process reads its own share with torchdata."""

    def _copier(self, device: Any) -> BatchCopier | None:
        return None  # torchdata's state is that of the batch which was read last


class StatefulDispatcher(StatefulLoader, DataLoaderDispatcher):
    """A loader that only the main process reads, with torchdata; what the others know of it is its end."""

    def _current_state(self) -> dict[str, Any]:
        return super()._current_state() if current_world().is_main else {_FINISHED: False}

    def _received(self, post: BatchTransfer) -> Iterator[BatchMessage | None]:
        self.next_iter_state = None
        return super()._received(post)


_KINDS: tuple[tuple[type, type], ...] = (
    (DataLoaderShard, StatefulShard),
    (DataLoaderDispatcher, StatefulDispatcher),
    (SkipDataLoader, StatefulSkip),
    (DataLoaderAdapter, StatefulAdapter),
)


@cache
def stateful(loader_class: type) -> type[Any]:
    """The class of loaders of this kind that are torchdata's too."""
    if issubclass(loader_class, StatefulDataLoader):
        return loader_class
    plain, twin = next((plain, twin) for plain, twin in _KINDS if issubclass(loader_class, plain))
    return twin if loader_class is plain else type(f"Stateful{loader_class.__name__}", (loader_class, twin), {})
