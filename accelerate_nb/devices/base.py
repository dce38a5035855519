"""The facts of an accelerator that are known without waking it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from accelerate_nb.devices.xla import XlaDevices


@dataclass(frozen=True, slots=True)
class AvailableDevices:
    """
    The devices that this machine computes with: `count` accelerators of one kind, and `cores` of the CPU.

    `kind` is torch's name for the device ("cuda", "xpu", "mps"; "cpu" where there is no accelerator and `count` is 0),
    `label` what people call one of them. `physical` is how many there are whatever the environment shows of them, `None`
    if that are as many; `variable` is the one that selects those that are shown, empty where none can.
    """

    kind: str
    label: str
    count: int
    cores: int
    physical: int | None = None
    variable: str = ""
    # what torch_xla would compute on, where it is installed or requested; `kind` is "xla" where it is requested
    xla: XlaDevices | None = None

    def missing(self, ids: str) -> tuple[str, ...]:
        """Those of `ids` (`all`, or as in `0,2`) that this machine does not have; names of devices are not checked."""
        numbers = [(entry, entry.partition(".")[0]) for entry in _entries(ids)]
        return tuple(item for item, number in numbers if number.isdecimal() and int(number) >= self._there)

    @property
    def numbered(self) -> str:
        """The number of accelerators, whatever the environment shows, and the numbers that name them."""
        if self._there == 1:
            return f"1 {self.label}, numbered 0"
        return f"{self._there} {self.label}s, numbered 0 to {self._there - 1}"

    def only(self, ids: str) -> AvailableDevices:
        """
        The devices of a process to which only `ids` are shown, whatever the environment shows.

        >>> AvailableDevices("cuda", "GPU", 8, 96).only("0,2").count
        2
        """
        return self if ids == "all" or not self.count else replace(self, count=len(_entries(ids)))

    def showing(self, ids: str) -> dict[str, str]:
        """The variable that shows a process only `ids`; none for all that it sees anyway."""
        return {} if ids == "all" or not self.count or not self.variable else {self.variable: ids}

    @property
    def _there(self) -> int:
        return self.count if self.physical is None else self.physical


def _entries(ids: str) -> list[str]:
    return [] if ids == "all" else ids.split(",")


class DeviceType(Protocol):
    """A kind of accelerator."""

    @property
    def name(self) -> str:
        """Torch's name for such a device."""

    @property
    def label(self) -> str:
        """The word for one device."""

    @property
    def build(self) -> str:
        """The name in `torch.version` of a build for these devices; empty if every torch is."""

    @property
    def variable(self) -> str:
        """The variable that selects the devices that a process sees; empty where none does."""

    def count(self, environment: Mapping[str, str]) -> int:
        """The number of devices that a process with this environment would see."""
