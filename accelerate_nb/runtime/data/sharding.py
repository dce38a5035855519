"""Samplers, one process's share of what all processes read, and the indices of its batches, taken one ahead of the data."""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.operations import collective
from accelerate_nb.runtime.operations.transfer import CollectiveCall, exchange_rows
from accelerate_nb.runtime.world.registry import current_world


@dataclass(frozen=True, slots=True)
class LastStep:
    """The real part of an epoch's last step: `real` samples of the `dealt` ones, the others are repeated."""

    real: int
    dealt: int  # the same where nothing is repeated, and fewer than in a full step
    whole: bool = False  # one sample, or batch of unknown size, is dealt to each process: both count processes

    @property
    def repeated(self) -> int:
        """The number of repeated samples."""
        return self.dealt - self.real


class BatchSamplerShard(BatchSampler):
    """
    One process's share of a batch sampler.

    Batches are dealt out in turn, or each is cut into `num_processes` parts with `split_batches`. What is left at the end is
    filled up with samples from the beginning, so that all processes have equally many of equal size; with
    `even_batches=False` it is dealt out as it is, and a batch sampler with `drop_last` leaves it out.

    On two processes, `[[0, 1], [2, 3], [4]]` is dealt out as `[[0, 1], [4, 0]]` and `[[2, 3], [1, 2]]`.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.last_step: LastStep | None = None
        if split_batches:
            check_divides(self.batch_size, num_processes)

    @property
    def sampler(self) -> Any:
        """The sampler of single indices inside."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    @property
    def total_length(self) -> int:
        """The number of batches for all processes together."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        if self.split_batches:
            sampler = getattr(self.batch_sampler, "sampler", None)
            if self.even_batches or self.drop_last or not isinstance(sampler, Sized):
                return self.total_length
            # the last batch may be known to be too short for all processes, and this one may get nothing of it
            last = len(sampler) % self.batch_size
            has_none = 0 < last <= self.process_index * (self.batch_size // self.num_processes)
            return self.total_length - int(has_none)
        whole, left = divmod(self.total_length, self.num_processes)
        if left == 0 or self.drop_last:
            return whole
        return whole + (self.even_batches or self.process_index < left)

    def __iter__(self) -> Iterator[Any]:
        return self.dealt(self.batch_sampler)

    def dealt(self, batches: Iterable[Any]) -> Iterator[Any]:
        """This process's share of an epoch's batches, which may come from elsewhere than the batch sampler."""
        self.last_step = None
        return self._parts(batches) if self.split_batches else self._turns(batches)

    def _parts(self, batches: Iterable[list[int]]) -> Iterator[list[int]]:
        """This process's part of every batch."""
        size = self.batch_size // self.num_processes
        share = slice(self.process_index * size, (self.process_index + 1) * size)
        first: list[int] | None = None
        for batch in batches:
            first = batch if first is None else first
            if len(batch) == self.batch_size:
                yield batch[share]
            elif not self.drop_last and len(batch) > 0:
                if self.even_batches:
                    self.last_step = LastStep(len(batch), self.batch_size)
                    yield filled_up(batch, first, self.batch_size)[share]
                elif part := batch[share]:
                    self.last_step = LastStep(len(batch), len(batch))
                    yield part

    def _turns(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Every `num_processes`-th batch; a round that isn't full waits until it is known whether another one follows."""
        first: list[Any] = []
        waiting: list[Any] = []
        for round_ in in_rounds(batches, self.num_processes):
            first = first or round_
            if waiting:
                yield waiting[self.process_index]
            has_all = len(round_) == self.num_processes
            if has_all and (self.batch_size is None or len(round_[-1]) == self.batch_size):
                waiting = []
                yield round_[self.process_index]
            else:
                waiting = round_
        if waiting and not self.drop_last:
            yield from self._from_last_round(waiting, first)

    def _from_last_round(self, round_: list[Any], first: list[Any]) -> Iterator[Any]:
        if not self.even_batches:
            for batch in round_[self.process_index : self.process_index + 1]:
                if self.batch_size is not None:
                    real = sum(map(len, round_))
                    self.last_step = LastStep(real, real)
                yield batch
        elif self.batch_size is None:
            # batches of any size, or single indices: whole ones are repeated
            self.last_step = LastStep(len(round_), self.num_processes, whole=True)
            yield filled_up(round_, first, self.num_processes)[self.process_index]
        else:
            dealt = self.num_processes * self.batch_size
            self.last_step = LastStep(sum(map(len, round_)), dealt)
            samples = filled_up(chain(*round_), chain(*first), dealt)
            yield samples[self.process_index * self.batch_size : (self.process_index + 1) * self.batch_size]


class IterableDatasetShard(IterableDataset[Any]):
    """
    One process's share of an iterable data set, which every process reads.

    Samples are dealt out in batches of `batch_size` in turn, or in parts of such a batch with `split_batches`. What is left at
    the end is filled up with samples from the beginning, or left out with `drop_last`. A `batch_size` of `None` deals out
    single elements, for a data set that makes batches itself.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            check_divides(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self.last_step: LastStep | None = None

    @property
    def total_length(self) -> int:
        """The number of samples for all processes together."""
        return len(self.dataset)

    @property
    def round_size(self) -> int:
        """The number of samples that all processes together take at a time."""
        return self._share_size * self.num_processes

    @property
    def _share_size(self) -> int:
        size = self.batch_size or 1
        return size // self.num_processes if self.split_batches else size

    def set_epoch(self, epoch: int) -> None:
        """The next reading is that of this epoch."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        rounds = self.total_length / self.round_size
        return (math.floor(rounds) if self.drop_last else math.ceil(rounds)) * self._share_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        share = slice(self.process_index * self._share_size, (self.process_index + 1) * self._share_size)
        self.last_step = None
        first: list[Any] | None = None
        for round_ in in_rounds(self.dataset, self.round_size):
            first = round_ if first is None else first
            if len(round_) == self.round_size:
                yield from round_[share]
            elif not self.drop_last:
                self.last_step = LastStep(len(round_), self.round_size, whole=self.batch_size is None)
                yield from filled_up(round_, first, self.round_size)[share]


def processes_of_copy(torch_device_mesh: Any) -> int:
    """The number of processes that have one copy of the model together, in a mesh of torch; 1 without one."""
    names = () if torch_device_mesh is None else torch_device_mesh.mesh_dim_names or ()
    return math.prod(torch_device_mesh.size(names.index(axis)) for axis in ("cp", "sp", "tp") if axis in names)


def check_divides(batch_size: int | None, num_processes: int) -> None:
    """`ConfigurationError` where a batch can't be cut into equal parts for the processes."""
    if batch_size is None:
        raise ConfigurationError(
            "split_batches=True was requested, but the batch sampler doesn't say how large its batches are. "
            "Give it an attribute `batch_size`, or leave split_batches out."
        )
    if batch_size % num_processes != 0:
        raise ConfigurationError(
            f"split_batches=True was requested, but the batch size ({batch_size}) needs to be a round multiple of the number "
            f"of processes ({num_processes}). Change one of them, or leave split_batches out."
        )


def in_rounds(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """The items in lists of `size`; the last one may be shorter."""
    iterator = iter(items)
    while round_ := list(islice(iterator, size)):
        yield round_


def with_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item with whether it is the last."""
    iterator = iter(items)
    for held in iterator:
        item = held
        for following in iterator:
            yield item, False
            item = following
        yield item, True


def filled_up(items: Iterable[Any], beginning: Iterable[Any], length: int) -> list[Any]:
    """The items, followed by those of the beginning, again and again, up to a length."""
    return list(islice(chain(items, cycle(beginning)), length))


class SeedableRandomSampler(RandomSampler):
    """A random order that depends on nothing but a seed and the epoch: `data_seed`, or the seed that torch began with."""

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = new_generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """The next order is that of this epoch."""
        self.epoch = epoch


def new_generator() -> torch.Generator:
    """A generator where tensors are made by default, since torch's samplers make tensors there."""
    return torch.Generator(device=torch.get_default_device())


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """A seed from torch's global generator: the draw that torch's samplers and loaders make, so that equal programs stay in step."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def index_source(dataloader: Any) -> Any:
    """The source of a loader's batches of indices; `sampler` itself may be a batch sampler, with `batch_size=None`."""
    return dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler


def get_sampler(dataloader: Any) -> Any:
    """The sampler of single indices in a loader; `None` where a batch sampler has none."""
    return getattr(index_source(dataloader), "sampler", None)


@contextmanager
def drawn_from(states: Mapping[str, Any]) -> Iterator[None]:
    """A block that draws from former states of the process's generators, where there are any, and leaves the current ones as they are."""
    if "random" not in states:
        yield
        return
    current = random_states()
    _set_random_states(states)
    try:
        yield
    finally:
        _set_random_states(current)


def random_states() -> dict[str, Any]:
    """The states of the process's generators that samplers draw from."""
    return {"random": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


def _set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["random"])
    if "python" in states:  # positions of former versions have none
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])


# Of an order so many batches, and so many indices, are compared: with fewer of them, shuffled orders may begin alike.
_COMPARED_BATCHES, _COMPARED_INDICES = 8, 64


@dataclass(eq=False)
class BatchIndices:
    """The indices of one epoch's batches, taken one ahead of the data, so that the last is known when it is loaded."""

    _source: Iterator[Any]
    given: int = 0
    exhausted: bool = False
    last: Any = None
    _first: list[Any] | None = None

    def begin(self) -> list[Any]:
        """Read the sampler's first index, unless that has happened: it is when samplers draw their order."""
        if self._first is None:
            self._first = list(islice(self._source, 1))
            self.exhausted = not self._first
        return self._first

    def __iter__(self) -> Iterator[Any]:
        for index, is_last in with_last(chain(self.begin(), self._source)):
            if is_last:
                self.exhausted, self.last = True, index
            self.given += 1
            yield index


@dataclass(eq=False)
class IndexSource:
    """The source of a `DataLoader`'s indices: its sampler, without the first batches of an epoch that was begun before."""

    sampler: Any
    skip: int = 0
    # with it ranks compare how an epoch's order begins; where one has another, all take the main process's, of at most so many batches
    longest: int | None = None
    # the order that was sent so, or that an epoch which goes on was begun with
    order: list[Any] | None = None
    current: BatchIndices = field(default_factory=lambda: BatchIndices(iter(())))

    def __iter__(self) -> Iterator[Any]:
        if self.longest is None and self.order is None:
            source = iter(self.sampler)
        elif isinstance(self.sampler, BatchSamplerShard):
            source = self.sampler.dealt(self._order_of(self.sampler.batch_sampler))
        else:
            source = self._order_of(self.sampler)
        self.current = BatchIndices(islice(source, self.skip, None) if self.skip else source)
        return iter(self.current)

    def __len__(self) -> int:
        return len(self.sampler)

    def _order_of(self, sampler: Any) -> Iterator[Any]:
        """The epoch's order for all ranks; the first step of the iteration draws and compares it."""
        indices = iter(sampler if self.order is None else self.order)
        if self.longest is not None:
            # the first batches, as many as are compared
            first: list[Any] = []
            count = 0
            for item in indices:
                first.append(item)
                count += len(item) if isinstance(item, Sized) else 1
                if len(first) >= _COMPARED_BATCHES and count >= _COMPARED_INDICES:
                    break
            call = CollectiveCall("iter", f"a loader with a {type(_drawing(sampler)).__name__}")
            digest = torch.frombuffer(
                bytearray(blake2b(repr(first).encode(), digest_size=16).digest()), dtype=torch.uint8
            )
            digests = [row.tolist() for row in exchange_rows(current_world(), call, digest)]
            other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
            indices = chain(first, indices)
            if other is not None:
                indices = self._sent(sampler, indices, other, self.longest)
        yield from indices

    def _sent(self, sampler: Any, indices: Iterator[Any], other: int, longest: int) -> Iterator[Any]:
        """The main process's order, on all ranks; `ConfigurationError` where it does not end."""
        whose = _drawing(sampler)
        problem = f"{type(whose).__name__} gives rank {other} other samples than the main process, "
        if getattr(whose, "num_replicas", 1) > 1:
            raise ConfigurationError(
                f"{problem}since it deals them out itself. A prepared loader deals them out, too, and parts of the data would be left "
                "out. Make the loader without this sampler, with shuffle=True instead."
            )
        order: list[Any] | None = None
        if current_world().is_main:
            order = list(islice(indices, longest + 1))
            order = None if len(order) > longest else order
        (sent,) = collective.broadcast_object_list([order])
        self.order = order
        if sent is None:
            raise ConfigurationError(
                f"{problem}since it draws from random numbers of its own, and its order can't be sent to all, since it does not end. Draw "
                "the order from a generator that has the same seed on all ranks, or pass dispatch_batches=True."
            )
        return iter(sent)


def _drawing(sampler: Any) -> Any:
    """The sampler that draws an order: the one inside, where batches are torch's own."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler
