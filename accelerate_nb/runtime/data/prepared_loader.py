"""Loaders that know their epoch, how far they have been read, and which batch is the last; and the rest of an epoch after its first batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate_nb.errors import StateError
from accelerate_nb.runtime.data import sharding
from accelerate_nb.runtime.data.adapter import DataLoaderAdapter, DataLoaderStateMixin, loader_arguments
from accelerate_nb.runtime.observability.progress import ProgressReporter
from accelerate_nb.runtime.observability.step_metrics import StepMetrics
from accelerate_nb.runtime.operations import collective
from accelerate_nb.runtime.operations.nested import placed
from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.user_warnings import warn_user

# The parts of a position that an epoch which goes on keeps of its first beginning.
_TAKEN_UP = ("random", "python", "numpy", "running")


@dataclass(eq=False)
class LoaderPosition:
    """The position of a loader in its epoch; a loader that skips the first batches of another shares it."""

    epoch: int
    batches: int = 0
    at_end: bool = False
    is_first: bool = True
    start: dict[str, Any] | None = None
    left: dict[str, Any] = field(default_factory=dict)
    pending: dict[str, Any] | None = None

    def begin(self, batches: int, start: dict[str, Any]) -> None:
        """An epoch begins, after its first `batches`; `start` holds the random states that it began with."""
        self.batches, self.at_end, self.start = batches, False, start

    def end(self) -> None:
        """The epoch is over, in whatever way; the next one is a new one."""
        self.left = {"epoch": self.epoch, "batches": self.batches, **(self.start or {})}
        self.epoch += 1
        self.batches, self.start, self.is_first = 0, None, False


class OuterLoop:
    """The state of a loader in a loop over it, inside of which another loop over it begins, such as to evaluate on training data."""

    def __init__(self, loader: PreparedLoader, *, is_resumed: bool) -> None:
        self._loader = loader
        self._flags = {"end_of_dataloader": loader.end_of_dataloader, "remainder": loader.remainder}
        is_position_kept = loader._course.start is not None and not is_resumed
        holders = (loader._course, loader._source) if is_position_kept else ()
        self._position = [(holder, dict(vars(holder))) for holder in holders if holder is not None]

    def restore(self, *, with_position: bool) -> bool:
        """Give the loader its state back, if the outer loop has not ended; returns whether its position was given back, too."""
        course, loaders = self._loader._course, self._loader.gradient_state.dataloader_references
        if not any(getattr(loader, "_course", None) is course for loader in loaders):
            return False
        vars(self._loader).update(self._flags)
        if not self._position or not with_position:
            return False
        pending = course.pending
        for holder, state in self._position:
            vars(holder).update(state)
        course.pending = pending
        return True


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A `DataLoader` of one process among others: each iteration is an epoch, and one saved half-read goes on after `resume`."""

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        self._source: sharding.IndexSource | None = None
        self._whole: PreparedLoader | None = None
        super().__init__(dataset, use_stateful_dataloader, **kwargs)
        self._source = self._index_source()
        self.gradient_state = GradientState()
        self.skip_batches = skip_batches
        self.warned_of_repeated = False
        # which of its process's loaders it is, where its epochs are shown as a bar
        self.bar: int | None = None
        # the loader that it was prepared from, which another launch prepares for itself
        self.unprepared: Any = None
        # whether all ranks read it, in one order
        self.is_shared = False
        # what is to be done before each batch and after the last
        self.between: Callable[[], None] | None = None
        # what makes of a batch this process's part of its sequences
        self.cut: Callable[[Any], Any] | None = None
        # what brings a batch to the devices, where to move it is not enough
        self.send: Callable[[Any], Any] | None = None
        # what measures a training's steps, and counts their samples
        self.step_metrics: StepMetrics | None = None
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._course = LoaderPosition(iteration)

    def _index_source(self) -> sharding.IndexSource | None:
        """The source of indices, where there are indices."""
        return None if isinstance(self.dataset, IterableDataset) else sharding.IndexSource(super()._index_sampler)

    @property
    def _index_sampler(self) -> Any:
        # `DataLoader`'s own hook: its iterators take their indices from here
        return super()._index_sampler if self._source is None else self._source

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
        start = {**self._states(), **{name: pending[name] for name in _TAKEN_UP if name in pending}}
        done = self.skip_batches or pending.get("batches", 0)
        outer = OuterLoop(self, is_resumed=bool(pending))
        self.begin()
        training_calls, is_complete = self.gradient_state.training_calls, False
        try:
            self.set_epoch(self.iteration)
            self._course.begin(done, start)
            batches = self._batches(self._to_skip(done), pending)
            if self.bar is not None:
                rest = length_of(self)
                total = None if rest is None else rest + self.skip_batches
                label = f"epoch {self.iteration}" + (f", loader {self.bar + 1}" if self.bar else "")
                batches = ProgressReporter(f"loader {self.bar}", label, total, done).through(batches)
            cut = batches if self.cut is None else _each(batches, self.cut)
            counted = cut if self.step_metrics is None else self.step_metrics.through(self, cut)
            yield from (counted if self.between is None else _with_breaks(counted, self.between))
            if self.gradient_state.training_calls == training_calls:
                # of a training's batches a repeated sample is no wrong number
                self.warn_of_repeated()
            is_complete = True
        finally:
            self.end()
            # a loop that was left, and that a variable or a traceback holds, may end after another one has begun
            is_current = self._course.start is start
            is_evaluation = is_current and self.gradient_state.training_calls == training_calls
            if not outer.restore(with_position=is_evaluation) and (is_current or is_complete):
                self._course.end()

    def _batches(self, skip: int, begun: Mapping[str, Any]) -> Generator[Any, None, None]:
        """This process's batches after the first `skip`, in the order of an epoch that was `begun` before, at that position."""
        raise NotImplementedError

    def _begun(self) -> Iterator[Any]:
        """Torch's iterator over the batches, which draws from generators what the epoch drew when it was begun first."""
        loader = self if self._whole is None else self._whole
        began_running = self._course.start is not None and self._course.start["running"]
        if self._running and not began_running:
            sharding.drawn_seed(loader.generator)  # workers that run already don't draw a seed, and these did
        elif began_running and not self._running:
            # workers that start now get a seed of their own
            generator, loader.generator = loader.generator, sharding.new_generator()
            loader.generator.manual_seed(torch.initial_seed() + loader.iteration)
            try:
                return super(PreparedLoader, loader).__iter__()
            finally:
                loader.generator = generator
        return super(PreparedLoader, loader).__iter__()

    @property
    def _running(self) -> bool:
        """Whether workers from a former epoch wait for this one."""
        return self.persistent_workers and (self if self._whole is None else self._whole)._iterator is not None

    def _to_skip(self, done: int) -> int:
        """The number of batches that torch's loader has to read and leave out, where so many are done."""
        return done

    def _ahead(self, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        """Each batch with whether it is the last, which shows when the next one is read."""
        return sharding.with_last(batches)

    def _synchronize(self, *, resumed: bool) -> None:
        """Make random states equal on all processes at an epoch's beginning, or what its order depends on if it is resumed."""

    def _ends(self) -> None:
        """The batch that follows is the last."""
        self.end_of_dataloader = self._course.at_end = True

    def begin(self) -> None:
        super().begin()
        self.remainder = self._samples_of_last_step()

    def _samples_of_last_step(self) -> int:
        """The number of samples of an epoch's last step that are not repeated ones; -1 where that can't be known before."""
        return -1

    @property
    def last_step(self) -> sharding.LastStep | None:
        """The real part of the epoch's last step; `None` where it is a full one, or that can't be known."""
        return None

    @property
    def step_size(self) -> int | None:
        """The number of samples that all processes together take in a full step; `None` where that is not known."""
        return None

    @property
    def batches_left(self) -> int | None:
        """The number of batches after the current one; `None` where that is not known."""
        if self.end_of_dataloader:
            return 0
        length = length_of(self)
        return None if length is None else max(0, length + self.skip_batches - self._course.batches)

    @property
    def batches_read(self) -> int:
        """The number of batches of the epoch so far, with the current one."""
        return self._course.batches

    @property
    def filled_step(self) -> sharding.LastStep | None:
        """The real part of the current step, where it may have repeated samples."""
        return self.last_step if self.end_of_dataloader else None

    @property
    def repeats(self) -> sharding.LastStep | None:
        """The samples of the epoch that were repeated, as those of one step."""
        return self.last_step

    @property
    def leads(self) -> bool:
        """Whether this process reports for all that read."""
        return True

    def warn_of_repeated(self) -> None:
        """Warn once, on the main process, where samples of this epoch are repeated and may be counted twice."""
        last = self.repeats
        if last is None or last.repeated == 0 or self.warned_of_repeated:
            return
        self.warned_of_repeated = True
        if not self.leads:
            return
        unit = "batches" if last.whole else "samples"
        total = self._course.batches * last.dealt
        warn_user(
            f"{last.repeated} of the {total} {unit} of this epoch were repeated ones, so that all processes have "
            "equally many (even_batches). `gather_for_metrics` leaves them out; a loader with drop_last=True leaves out what "
            "does not divide instead. This warning comes once."
        )

    @property
    def stride(self) -> int:
        """The number of batches of the unprepared loader that make one step of all processes."""
        return 1

    # Epochs and positions

    def set_epoch(self, epoch: int) -> None:
        """Make this epoch the next iteration; every sampler and data set with a `set_epoch` gets it."""
        if self._course.pending is not None and self._course.pending["epoch"] != epoch:
            self._course.pending = None
        self.iteration = epoch
        source = sharding.index_source(self)
        inner = getattr(source, "batch_sampler", None)
        found = (source, getattr(source, "sampler", None), inner, self.sampler, self.dataset)
        for item in {id(item): item for item in found}.values():
            if item is not None and hasattr(item, "set_epoch"):
                item.set_epoch(epoch)

    def position(self) -> dict[str, Any]:
        """The loader's position, in numbers and tensors, with the current batch as done: the argument of `resume`."""
        course = self._course
        if course.pending is not None:
            return course.pending
        if course.start is None or course.at_end:
            following = course.epoch + (course.start is not None)
            states = {"generators": self._states()["generators"], "running": self._running}
            return {"epoch": following, "batches": 0, "stride": self.stride, "seed": self._seed, **states}
        position = {"epoch": course.epoch, "batches": course.batches, "stride": self.stride, "seed": self._seed}
        order = None if self._source is None else self._source.order
        return {**position, **course.start, **({} if order is None else {"order": order})}

    def resume(self, position: dict[str, Any]) -> None:
        """The next iteration goes on where `position` was taken, also with another number of processes."""
        missing = {"epoch", "batches", "stride", "generators"} - set(position)
        if missing:
            raise StateError(
                f"A loader was to be resumed from a position without {', '.join(sorted(missing))}. "
                "Pass what its `position()` returned."
            )
        self._course.epoch, sampler = position["epoch"], sharding.get_sampler(self)
        if isinstance(sampler, sharding.SeedableRandomSampler) and position.get("seed") is not None:
            sampler.initial_seed = position["seed"]
        batches = position["batches"] * position["stride"] // self.stride
        self._course.pending = {**position, "batches": batches, "stride": self.stride}

    def state_dict(self) -> dict[str, Any]:
        """The same as `position`, under the name that checkpoints of other libraries read."""
        return self.position()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The same as `resume`."""
        self.resume(state_dict)

    def skipping(self, batches: int) -> PreparedLoader:
        """The same loader without its first batches; reading either of them is an epoch of both."""
        twin = object.__new__(type(self))
        # what reads for it is the loader itself, whose workers may run already
        whole = self if self._whole is None else self._whole
        twin.__dict__.update(self.__dict__, _iterator=None, _whole=whole, skip_batches=self.skip_batches + batches)
        return twin

    def __copy__(self) -> PreparedLoader:
        """A loader at the same position, which counts its own epochs."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _course=replace(self._course))
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
        """The seed that the orders of all epochs depend on, where it is a seed."""
        sampler = sharding.get_sampler(self)
        return sampler.initial_seed if isinstance(sampler, sharding.SeedableRandomSampler) else None

    def _states(self) -> dict[str, Any]:
        generators = {name: generator.get_state() for name, generator in self._generators().items()}
        return {"generators": generators, **sharding.random_states(), "running": self._running}

    def _generators(self) -> dict[str, torch.Generator]:
        """The generators on which the order of samples depends, besides torch's own."""
        sampler = self.sampler if sharding.get_sampler(self) is None else sharding.get_sampler(self)
        found = {
            "sampler": getattr(sampler, "generator", None),
            "loader": self.generator,
            "synchronized": getattr(self, "synchronized_generator", None),
        }
        if isinstance(sampler, sharding.SeedableRandomSampler):
            del found["sampler"]  # its order depends on the epoch alone
        return {name: generator for name, generator in found.items() if isinstance(generator, torch.Generator)}

    # What is inside

    @property
    def total_dataset_length(self) -> int:
        """The number of samples for all processes together."""
        dataset: Any = self.dataset
        return int(dataset.total_length) if hasattr(dataset, "total_length") else len(dataset)

    def get_sampler(self) -> Any:
        """The sampler of single indices."""
        return sharding.get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Take single indices from another sampler."""
        sharding.index_source(self).sampler = sampler

    def __getstate__(self) -> dict[str, Any]:
        # the state of accumulation, and what measures steps, belong to a process, and running workers can't be copied
        source = None if self._source is None else sharding.IndexSource(self._source.sampler)
        return {**self.__dict__, "_iterator": None, "_source": source, "gradient_state": None, "step_metrics": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, gradient_state=GradientState())


def _each(batches: Generator[Any, None, None], change: Callable[[Any], Any]) -> Generator[Any, None, None]:
    with closing(batches):
        yield from map(change, batches)


def _with_breaks(batches: Generator[Any, None, None], between: Callable[[], None]) -> Iterator[Any]:
    """The batches, with something done before each and after the last."""
    between()
    # a loop that is left early ends the reading here, not when the last reference to it goes
    with closing(batches):
        for batch in batches:
            yield batch
            between()


def length_of(sized: Any) -> int | None:
    """The length of an object; `None` where that is not known."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # what torch raises for data sets and samplers without a length
        return None


@dataclass(eq=False)
class SequenceLoader:
    """This process's part of a batch of each process of a group along `sp`, one after the other, for every batch of a loader."""

    loader: Any
    processes: int
    _cut: Callable[[Any], Any]
    _device: Any
    # how many of the first parts are left out
    _skip: int = 0

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(0, len(self.loader) * self.processes - self._skip)

    def __iter__(self) -> Iterator[Any]:
        loader, skip = self.loader, self._skip
        for batch in loader:
            is_last = getattr(loader, "end_of_dataloader", False)
            batches = collective.gather_object([placed(batch, "cpu")], axis="sp")
            for index, whole in enumerate(batches[skip:], skip + 1):
                # a window of accumulation ends with the last part, not with the last batch
                loader.end_of_dataloader = is_last and index == self.processes
                yield self._cut(placed(whole, self._device))
            skip = 0


def cut_for_group(loader: Any, cut: Callable[[Any], Any] | None, processes: int, device: Any) -> Any:
    """A loader of whole sequences with its sequences cut for a group of so many; anything else as it is."""
    is_cut = isinstance(loader, PreparedLoader) and loader.cut is not None
    if cut is None or processes == 1 or is_cut or not isinstance(loader, DataLoader):
        return loader
    return SequenceLoader(loader, processes, cut, device)


@dataclass(eq=False)
class SkipBatchSampler(BatchSampler):
    """A batch sampler without the first `skip_batches` batches of another."""

    batch_sampler: Any
    skip_batches: int = 0

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
        return replace(dataloader, loader=skip_first_batches(dataloader.loader, batches), _skip=parts)
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
