"""A loader that knows its epoch, how far it has been read, and which batch is its last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate_nb.errors import NotYetError, StateError
from accelerate_nb.runtime.accumulation import GradientState
from accelerate_nb.runtime.data.sampling import SeedableRandomSampler, get_sampler, index_source
from accelerate_nb.runtime.data.sharding import IterableDatasetShard, with_last
from accelerate_nb.runtime.kinds import named
from accelerate_nb.runtime.operations.nested import send_to_device
from accelerate_nb.runtime.seeds import synchronize_rng_states


class DataLoaderStateMixin:
    """What `GradientState` asks of the loader that is being read."""

    end_of_dataloader: bool = False
    remainder: int = -1
    gradient_state: GradientState

    def reset(self) -> None:
        """Nothing has been read."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Reading begins."""
        self.reset()
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Reading has ended, in whatever way."""
        self.gradient_state._remove_dataloader(self)


class Indices:
    """The indices of one epoch's batches, taken one ahead of the data, so that the last is known when it is loaded."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.given = 0
        self.exhausted = False
        self._source = source
        self._held: list[Any] = []
        self._begun = False

    def __iter__(self) -> Indices:
        return self

    def __next__(self) -> Any:
        self.begin()
        if self.exhausted:
            raise StopIteration
        index = self._held.pop()
        self._take()
        self.given += 1
        return index

    def begin(self) -> None:
        """Ask the sampler for its first index, unless that has happened: it is when samplers draw their order."""
        if not self._begun:
            self._begun = True
            self._take()

    def _take(self) -> None:
        for index in self._source:
            self._held.append(index)
            return
        self.exhausted = True


class IndexSource:
    """What a `DataLoader` takes indices from: its sampler, without the first batches of an epoch that was begun before."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.skip = 0
        self.current = Indices(iter(()))

    def __iter__(self) -> Indices:
        source = iter(self.sampler)
        self.current = Indices(islice(source, self.skip, None) if self.skip else source)
        return self.current

    def __len__(self) -> int:
        return len(self.sampler)


class Course:
    """How far a loader has been read; a loader that skips the first batches of another shares it."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches = 0
        self.at_end = False
        self.start: dict[str, Any] | None = None
        self.pending: dict[str, Any] | None = None

    def begin(self, batches: int, start: dict[str, Any]) -> None:
        """An epoch begins, after its first `batches`; `start` holds the random states that it began with."""
        self.batches, self.at_end, self.start = batches, False, start

    def end(self) -> None:
        """The epoch is over, in whatever way; the next one is a new one."""
        self.epoch += 1
        self.batches, self.start = 0, None


class PreparedLoader(DataLoader[Any], DataLoaderStateMixin):
    """
    A `DataLoader` of one process among others.

    Every iteration is an epoch, whether it is read to its end or left before; an epoch that was saved half-read with
    `position` goes on after `resume`. `_batches` says how batches are made.
    """

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        if torch_device_mesh is not None:
            raise NotYetError("A loader with a device mesh is not offered here yet. Leave torch_device_mesh out.")
        self._source: IndexSource | None = None
        super().__init__(dataset, **kwargs)
        if not isinstance(self.dataset, IterableDataset):
            self._source = IndexSource(super()._index_sampler)
        self.gradient_state = GradientState()
        self.skip_batches = skip_batches
        self.use_stateful_dataloader = use_stateful_dataloader
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._course = Course(iteration)

    @property
    def _index_sampler(self) -> Any:
        # `DataLoader`'s own hook: its iterators take their indices from here
        return super()._index_sampler if self._source is None else self._source

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The torch loader inside, which is this one."""
        return self

    @property
    def iteration(self) -> int:
        """The epoch that is being read, or that will be read next."""
        return self._course.epoch

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self._course.epoch = iteration

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own class of iterators
        pending = self._take_pending()
        self._synchronize(resumed=pending.get("batches", 0) > 0)
        start = self._states()
        skip = self.skip_batches or pending.get("batches", 0)
        self.begin()
        try:
            self.set_epoch(self.iteration)
            self._course.begin(skip, {**start, "random": pending.get("random", start["random"])})
            yield from self._batches(skip, pending.get("random"))
        finally:
            self._course.end()
            self.end()

    def _batches(self, skip: int, random: torch.Tensor | None) -> Iterator[Any]:
        """This process's batches after the first `skip`, with the order drawn from `random` where it is given."""
        raise NotImplementedError

    def _synchronize(self, *, resumed: bool) -> None:
        """Make random states equal on all processes at an epoch's beginning, or what its order depends on if it is resumed."""

    def _ends(self) -> None:
        """The batch that follows is the last."""
        self.end_of_dataloader = self._course.at_end = True

    def begin(self) -> None:
        super().begin()
        self.remainder = self._samples_of_last_step()

    def _samples_of_last_step(self) -> int:
        """How many samples of an epoch's last step are not repeated ones; -1 where that can't be known before."""
        return -1

    @property
    def stride(self) -> int:
        """How many batches of the loader as it was before `prepare` make one step of all processes."""
        return 1

    # Epochs and positions

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; every sampler and data set that wants to know is told."""
        if self._course.pending is not None and self._course.pending["epoch"] != epoch:
            self._course.pending = None
        self.iteration = epoch
        source = index_source(self)
        inner = getattr(source, "batch_sampler", None)
        found = (source, getattr(source, "sampler", None), inner, self.sampler, self.dataset)
        for told in {id(each): each for each in found}.values():
            if told is not None and hasattr(told, "set_epoch"):
                told.set_epoch(epoch)

    def position(self) -> dict[str, Any]:
        """
        Where the loader stands, in numbers and tensors: what `resume` takes.

        Inside of an iteration, the batch at hand counts as done.
        """
        course = self._course
        if course.pending is not None:
            return course.pending
        if course.start is None or course.at_end:
            following = course.epoch + (course.start is not None)
            states = {"generators": self._states()["generators"]}
            return {"epoch": following, "batches": 0, "stride": self.stride, "seed": self._seed, **states}
        here = {"epoch": course.epoch, "batches": course.batches, "stride": self.stride, "seed": self._seed}
        return {**here, **course.start}

    def resume(self, position: dict[str, Any]) -> None:
        """The next iteration goes on where `position` was asked for, also with another number of processes."""
        missing = {"epoch", "batches", "stride", "generators"} - set(position)
        if missing:
            raise StateError(
                f"A loader was to be resumed from a position without {', '.join(sorted(missing))}. "
                "Pass what its `position()` returned."
            )
        self._course.epoch = position["epoch"]
        if isinstance(sampler := get_sampler(self), SeedableRandomSampler) and position.get("seed") is not None:
            sampler.initial_seed = position["seed"]
        self._course.pending = {
            **position,
            "batches": position["batches"] * position["stride"] // self.stride,
            "stride": self.stride,
        }

    def state_dict(self) -> dict[str, Any]:
        """The same as `position`, under the name that checkpoints of other libraries look for."""
        return self.position()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The same as `resume`."""
        self.resume(state_dict)

    def skipping(self, batches: int) -> PreparedLoader:
        """The same loader without its first batches; reading either of them is an epoch of both."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _iterator=None, skip_batches=self.skip_batches + batches)
        if self._source is not None:
            twin.__dict__["_source"] = IndexSource(self._source.sampler)
        return twin

    def _take_pending(self) -> dict[str, Any]:
        pending, self._course.pending = self._course.pending, None
        if pending is None:
            return {}
        generators = self._generators()
        for name, state in pending["generators"].items():
            if name in generators:
                generators[name].set_state(state)
        return pending

    @property
    def _seed(self) -> int | None:
        """What the orders of all epochs depend on, where it is a seed."""
        sampler = get_sampler(self)
        return sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None

    def _states(self) -> dict[str, Any]:
        generators = {name: generator.get_state() for name, generator in self._generators().items()}
        return {"generators": generators, "random": torch.get_rng_state()}

    def _generators(self) -> dict[str, torch.Generator]:
        """The generators on which the order of samples depends, besides torch's own."""
        sampler = self.sampler if get_sampler(self) is None else get_sampler(self)
        # the order of a seedable sampler depends on the epoch alone
        own = None if isinstance(sampler, SeedableRandomSampler) else getattr(sampler, "generator", None)
        found = {
            "sampler": own,
            "loader": self.generator,
            "synchronized": getattr(self, "synchronized_generator", None),
        }
        return {name: generator for name, generator in found.items() if isinstance(generator, torch.Generator)}

    # What is inside

    @property
    def total_dataset_length(self) -> int:
        """How many samples there are for all processes together."""
        dataset: Any = self.dataset
        return int(dataset.total_length) if hasattr(dataset, "total_length") else len(dataset)

    def get_sampler(self) -> Any:
        """The sampler of single indices."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Take single indices from another sampler."""
        index_source(self).sampler = sampler

    def __getstate__(self) -> dict[str, Any]:
        # the state of accumulation belongs to a process, and running workers can't be copied
        source = None if self._source is None else IndexSource(self._source.sampler)
        return {**self.__dict__, "_iterator": None, "_source": source, "gradient_state": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, gradient_state=GradientState())


class DataLoaderShard(PreparedLoader):
    """A loader whose every process reads its own share, on its own device."""

    def __init__(
        self,
        dataset: Any,
        device: Any = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            **kwargs,
        )
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator

    def _synchronize(self, *, resumed: bool) -> None:
        wanted = [each for each in self.rng_types or () if not resumed or named(each) == "generator"]
        synchronize_rng_states(wanted, self.synchronized_generator)

    def _batches(self, skip: int, random: torch.Tensor | None) -> Iterator[Any]:
        with drawn_from(random):
            batches = self._read(skip)
        if self._source is None:
            yield from self._one_ahead(batches)
        else:
            yield from self._counted(batches, self._source.current)

    def _read(self, skip: int) -> Iterator[Any]:
        """Torch's iterator over the batches after the first `skip`, its order drawn."""
        if self._source is None:
            batches = super(PreparedLoader, self).__iter__()
            for _ in islice(batches, skip):
                pass
            return batches
        self._source.skip = skip
        batches = super(PreparedLoader, self).__iter__()
        self._source.current.begin()
        return batches

    def _counted(self, batches: Iterator[Any], indices: Indices) -> Iterator[Any]:
        course, device, non_blocking = self._course, self.device, self._non_blocking
        for count, batch in enumerate(batches, 1):
            course.batches += 1
            if indices.exhausted and count == indices.given:
                self._ends()
            yield batch if device is None else send_to_device(batch, device, non_blocking)

    def _one_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """An iterable data set does not say that it is at its end before it is asked for more."""
        moved = (
            batch if self.device is None else send_to_device(batch, self.device, self._non_blocking)
            for batch in batches
        )
        for batch, is_last in with_last(moved):
            self._course.batches += 1
            if is_last:
                self._ends()
            yield batch

    @property
    def stride(self) -> int:
        shard = self.dataset if isinstance(self.dataset, IterableDatasetShard) else index_source(self)
        return 1 if getattr(shard, "split_batches", False) else getattr(shard, "num_processes", 1)

    @property
    def total_batch_size(self) -> int:
        """How many samples all processes together take in a step."""
        size = self._step_size()
        if size is None:
            raise StateError(
                f"total_batch_size was asked for, but {type(index_source(self)).__name__} does not say how large its batches "
                "are. Give it an attribute `batch_size`."
            )
        return size

    def _step_size(self) -> int | None:
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset.round_size
        source = index_source(self)
        size: int | None = self.batch_size if source is None else getattr(source, "batch_size", None)
        return None if size is None else size * self.stride

    def _samples_of_last_step(self) -> int:
        size = self._step_size()
        if self._drop_last or size is None:
            return -1
        whole = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        length = length_of(get_sampler(self))
        length = length_of(whole) if length is None else length
        return -1 if length is None else length % size


def length_of(sized: Any) -> int | None:
    """How many there are; `None` where that is not known."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # what torch says of data sets and samplers without a length
        return None


@contextmanager
def drawn_from(random: torch.Tensor | None) -> Iterator[None]:
    """A block that draws from a former state of torch's generator, and leaves the present one as it is."""
    if random is None:
        yield
        return
    present = torch.get_rng_state()
    torch.set_rng_state(random)
    try:
        yield
    finally:
        torch.set_rng_state(present)
