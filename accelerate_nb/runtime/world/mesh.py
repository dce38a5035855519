"""The mesh of a training: the named degrees in which it is spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeAlias

from accelerate_nb.errors import ConfigurationError

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
