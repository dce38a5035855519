"""What every kind of accelerator can say of itself without being woken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Devices:
    """
    What this machine computes with: `count` accelerators of one kind, and `cores` of the CPU.

    `kind` is torch's name for the device ("cuda", "xpu", "mps"; "cpu" where there is no accelerator and `count` is 0),
    `label` what people call one of them.
    """

    kind: str
    label: str
    count: int
    cores: int


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

    def count(self, environment: Mapping[str, str]) -> int:
        """How many of them a process with this environment would see."""
