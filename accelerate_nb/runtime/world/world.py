"""This process among those of a run, and the mesh of a training: the named degrees in which it is spread over ranks."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from accelerate_nb.errors import ConfigurationError, LaunchError

# The axes along which an operation goes: one, several together, or `None` for all ranks.
Axis: TypeAlias = str | Sequence[str] | None

# From the outermost to the innermost: stages of a pipeline, copies of the model, shards of its weights, parts of a sequence (cut by
# torch, or by DeepSpeed), and parts of each layer's width. Neighbours on the last axis have the fastest connection.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
# Of these axes ranks see different samples; along the others they work on the same ones.
DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, slots=True)
class Mesh:
    """
    Degrees by axis, from the outermost to the innermost, whose ranks are neighbours; their product is the number of ranks.

    >>> mesh = Mesh(dp_shard=2, tp=2)
    >>> mesh.size, str(mesh), mesh.coordinates(3), mesh.ranks_along(3, "tp"), mesh.data_replica(3)
    (4, 'dp_shard 2 x tp 2', {'dp_shard': 1, 'tp': 1}, (2, 3), (1, 2))
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if min(getattr(self, axis) for axis in AXES) < 1:
            text = ", ".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) < 1)
            raise ConfigurationError(f"{text} was requested, but a degree is at least 1. Leave it out for 1.")

    @property
    def degrees(self) -> Mapping[str, int]:
        """The axes that are in use, with more than one rank each."""
        return {axis: degree for axis in AXES if (degree := getattr(self, axis)) > 1}

    @property
    def size(self) -> int:
        return prod(getattr(self, axis) for axis in AXES)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items()) or "one rank"

    def checked(self, size: int) -> Mesh:
        """This mesh, for so many ranks; `ConfigurationError` where it has another number, with degrees that fit."""
        if self.size == size:
            return self
        fitting = []
        for axis in self.degrees or ("dp_replicate",):
            others = self.size // getattr(self, axis)
            if size % others == 0:
                fitting.append(f"{axis}={size // others}")
        advice = f"Launch {self.size} ranks."
        if fitting:
            advice = f"With the others as they are, one of these fits: {'; '.join(fitting)}."
        raise ConfigurationError(f"The degrees {self} make {self.size} ranks, but there are {size}. {advice}")

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """A rank's index along each axis that is in use."""
        found, rest = {}, rank
        for axis, degree in reversed(list(self.degrees.items())):
            rest, found[axis] = divmod(rest, degree)
        return {axis: found[axis] for axis in self.degrees}

    def ranks_along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks whose coordinates are this rank's but along some axes, itself among them, in their order."""
        if unknown := [axis for axis in axes if axis not in AXES]:
            raise ConfigurationError(
                f"The axis {', '.join(unknown)} was requested. Known axes of a mesh are {', '.join(AXES)}."
            )
        own = self.coordinates(rank)
        found, stride = [0], self.size
        for axis, degree in self.degrees.items():
            stride //= degree
            indices = range(degree) if axis in axes else (own[axis],)
            found = [start + index * stride for start, index in product(found, indices)]
        return tuple(found)

    def data_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks with other samples than this one's, and itself, in their order."""
        return self.ranks_along(rank, *DATA_AXES)

    def data_replica(self, rank: int, *more_axes: str) -> tuple[int, int]:
        """The index of a rank's stream of samples, and the number of different streams, which differ along `more_axes` too."""
        along = self.ranks_along(rank, *DATA_AXES, *more_axes)
        return along.index(rank), len(along)


@dataclass(frozen=True, slots=True)
class World:
    """One process among the others: its rank, its local rank, its device, and its connection to them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str | None
    # how the training of an `Accelerator` is spread over the ranks
    training_mesh: Mesh | None = None
    # of the ranks along an axis, the group that they talk over
    axis_group: Any = None

    @property
    def mesh(self) -> Mesh:
        """The degrees in which a training is spread over the ranks; copies of the model, where there is no `Accelerator`."""
        return self.training_mesh or Mesh(dp_replicate=self.size)

    @property
    def group(self) -> Any:
        """The process group over which ranks talk; `None` for one that is alone."""
        return self.axis_group or dist.group.WORLD

    @property
    def store(self) -> dist.Store:
        """The store of this group's rendezvous."""
        return dist.distributed_c10d._get_default_store()

    @property
    def exchange_world(self) -> World:
        """This world on the device that rows of bytes are sent from: its own, unless they travel between hosts."""
        return self

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def barrier(self) -> None:
        """Wait until every process has called this; nothing to wait for where there is one."""
        if self.size == 1:
            return
        # nccl needs its device, or it guesses one from the rank, which is another rank's on a second machine
        has_index = self.device.type == "cuda" and self.device.index is not None
        dist.barrier(self.axis_group, device_ids=[self.device.index] if has_index else None)

    def settle(self) -> None:
        """Have the device begin with all pending work; most begin at once."""

    def when_computed(self, report: Callable[[Any], None], values: Any) -> None:
        """Call `report` with values, a nest of tensors and other things, when what they are now can be read without waiting."""
        report(values)

    def report_deferred(self) -> None:
        """Report the values that still wait for being computed; all processes call it."""


def rank_numbers(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size: an existing group's, else by torchrun's variables, else of one alone."""
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        rank, size = number_in(environment, "RANK", 0), number_in(environment, "WORLD_SIZE", 1)
    local_rank, local_size = (
        number_in(environment, "LOCAL_RANK", rank),
        number_in(environment, "LOCAL_WORLD_SIZE", size),
    )
    if not 0 <= rank < size:
        raise LaunchError(
            f"RANK={rank} was given with WORLD_SIZE={size}, and ranks count from 0 to {size - 1}. "
            "Start the processes with a launcher, or correct the two variables."
        )
    return rank, size, local_rank, local_size


def make_default_group(**arguments: Any) -> None:
    """`torch.distributed.init_process_group` with these arguments."""
    dist.init_process_group(**arguments)
    # gloo's threads let go of tensors after a collective, which takes the interpreter; one that comes to it too late aborts the process
    atexit.unregister(_wait_for_threads)
    atexit.register(_wait_for_threads)
    if (device := arguments.get("device_id")) is not None and dist.group.WORLD is not None:
        # a default group that is not the process's first has no list of its ranks, and reads past its end when it is split
        # (`groupRanks` of ProcessGroupNCCL.cpp, torch 2.11): a device mesh would end the process
        backend: Any = dist.group.WORLD._get_backend(torch.device(device))
        backend.options.global_ranks_in_group = list(range(dist.get_world_size()))


def _wait_for_threads() -> None:
    # nothing tells when they have; the sleep leaves them the interpreter
    time.sleep(0.02)


def number_in(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    """The number that a variable holds, or `otherwise` for one that is not set."""
    text = environment.get(name, "")
    try:
        return int(text) if text else otherwise
    except ValueError:
        raise ConfigurationError(
            f"The environment variable {name} should be a whole number, but is {text!r}. Correct or remove it."
        ) from None
