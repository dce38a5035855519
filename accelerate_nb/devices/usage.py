"""The gauges of how busy the ranks' devices are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from accelerate_nb.events.model import DeviceSample


@dataclass(frozen=True, slots=True)
class RankProcesses:
    """`size` ranks, and the processes of those that run; ranks that are threads share one. `memory` is all that there is, in bytes."""

    size: int
    pids: Mapping[int, int]
    memory: int


class DeviceGauge(Protocol):
    """A kind of device that reports its load; nothing waits long for it, and the query wakes nothing."""

    def samples(self, ranks: RankProcesses, now: float) -> Iterable[DeviceSample]:
        """The load of these ranks' devices; a rank whose device does not report it is left out."""

    def close(self) -> None:
        """End the queries."""


class UnmeasuredDevices:
    """Devices that report nothing."""

    def samples(self, ranks: RankProcesses, now: float) -> Iterable[DeviceSample]:
        return ()

    def close(self) -> None:
        """Nothing was opened."""
