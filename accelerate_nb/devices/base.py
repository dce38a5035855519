"""What every kind of accelerator can say of itself without being woken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from accelerate_nb.devices.xla import Found


@dataclass(frozen=True, slots=True)
class Devices:
    """
    What this machine computes with: `count` accelerators of one kind, and `cores` of the CPU.

    `kind` is torch's name for the device ("cuda", "xpu", "mps"; "cpu" where there is no accelerator and `count` is 0),
    `label` what people call one of them. `physical` is how many there are whatever the environment shows of them, `None`
    if that are as many; `variable` is the one that says which are shown, empty where none can.
    """

    kind: str
    label: str
    count: int
    cores: int
    physical: int | None = None
    variable: str = ""
    # what torch_xla would compute on, where it is installed or asked for; `kind` is "xla" where it is what is asked for
    xla: Found | None = None

    def missing(self, ids: str) -> tuple[str, ...]:
        """Those of `ids` (`all`, or as in `0,2`) that this machine does not have; names of devices are not looked up."""
        numbers = [(one, one.partition(".")[0]) for one in _entries(ids)]
        return tuple(one for one, number in numbers if number.isdecimal() and int(number) >= self._there)

    def only(self, ids: str) -> Devices:
        """
        What a process finds to which only `ids` are shown, whatever the environment shows.

        >>> Devices("cuda", "GPU", 8, 96).only("0,2").count
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


class Kind(Protocol):
    """A kind of accelerator."""

    @property
    def name(self) -> str:
        """Torch's name for such a device."""

    @property
    def label(self) -> str:
        """What people call one."""

    @property
    def build(self) -> str:
        """The name in `torch.version` that says for which of them this torch was built; empty if every torch is."""

    @property
    def variable(self) -> str:
        """The variable that says which of them a process sees; empty where nothing does."""

    def count(self, environment: Mapping[str, str]) -> int:
        """How many of them a process with this environment would see."""
