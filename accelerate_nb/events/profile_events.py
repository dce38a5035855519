"""The events of profiles: the operations that the steps of a rank spend their time in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ProfiledOperation(NamedTuple):
    """
    An operation of profiled steps: its calls, the seconds spent in itself and not in what it calls, and their share of all such time.

    `device` is where that time was spent: "cpu", or the type of the device.
    """

    name: str
    calls: int
    seconds: float
    share: float
    device: str


@dataclass(frozen=True, slots=True)
class ProfileRequested:
    """A rank is to profile its next `steps` optimizer steps; `number` counts the profiles of the run."""

    rank: int
    number: int
    steps: int
    time: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """
    The costliest operations of a rank's steps, the costliest first, as torch's profiler saw them.

    The profile of this number took `seconds` for `steps` steps, which are fewer than were requested where the function has ended. `trace` is
    the file of its trace on the rank's machine; `problem` is why there is no profile, empty where there is one.
    """

    rank: int
    number: int
    steps: int
    seconds: float
    operations: tuple[ProfiledOperation, ...]
    trace: str
    time: float
    problem: str = ""
