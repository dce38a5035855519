"""What can be asked how busy the devices of ranks are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from accelerate_nb.events.model import DeviceSample


@dataclass(frozen=True, slots=True)
class Ranks:
    """`size` ranks, and the processes of those that run; ranks that are threads share one. `memory` is all that there is, in bytes."""

    size: int
    pids: Mapping[int, int]
    memory: int


class Gauge(Protocol):
    """A kind of device that tells how busy it is; nothing waits long for it, and nothing is waked by asking."""

    def samples(self, ranks: Ranks, now: float) -> Iterable[DeviceSample]:
        """How busy the devices of these ranks are; a rank whose device does not tell is left out."""

    def close(self) -> None:
        """Ask no more."""


class Unknown:
    """Devices that tell nothing."""

    def samples(self, ranks: Ranks, now: float) -> Iterable[DeviceSample]:
        return ()

    def close(self) -> None:
        """Nothing was opened."""
