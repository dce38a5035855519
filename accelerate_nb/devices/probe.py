"""The devices of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from accelerate_nb.devices import xla
from accelerate_nb.devices.cpu import cores
from accelerate_nb.devices.gpus import DEVICE_TYPES, torch_is_built_for
from accelerate_nb.devices.xla import XlaDevices


@dataclass(frozen=True, slots=True)
class AvailableDevices:
    """The devices that this machine computes with: `count` accelerators of one kind, and `cores` of the CPU."""

    # torch's name for the device ("cuda", "xpu", "mps"; "cpu" where there is no accelerator), and what people call one
    kind: str
    label: str
    count: int
    cores: int
    # how many there are whatever the environment shows of them by `variable`; `None` if that are as many
    physical: int | None = None
    variable: str = ""
    # what torch_xla would compute on, where it is installed or requested; `kind` is "xla" where it is requested
    xla: XlaDevices | None = None

    @property
    def trouble(self) -> str:
        """Why no worker could compute on them, and what to do; empty where they can be computed on."""
        return self.xla.trouble if self.xla is not None and self.kind == "xla" else ""

    def holders(self) -> list[int]:
        """The processes that hold a TPU's chips, which belong to one at a time; none for other devices."""
        return xla.holders() if self.xla is not None and self.xla.device == "TPU" else []

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
        """The devices of a process to which only `ids` ("0,2") are shown, whatever the environment shows."""
        return self if ids == "all" or not self.count else replace(self, count=len(_entries(ids)))

    def showing(self, ids: str) -> dict[str, str]:
        """The variable that shows a process only `ids`; none for all that it sees anyway."""
        return {} if ids == "all" or not self.count or not self.variable else {self.variable: ids}

    @property
    def _there(self) -> int:
        return self.count if self.physical is None else self.physical


def _entries(ids: str) -> list[str]:
    return [] if ids == "all" else ids.split(",")


def probe(environment: Mapping[str, str] | None = None) -> AvailableDevices:
    """The devices of a worker with this environment, by default this process's; no driver is woken, no torch imported."""
    variables = os.environ if environment is None else environment
    through = xla.detect_devices(variables)
    if through is not None:
        is_loaded = "torch_xla" in sys.modules
        held = xla.holder_in_process(through.device)
        through = replace(through, held=held, by_import=through.device == "CPU" and is_loaded)
    if through is not None and through.requested and not through.by_import:
        return _of_xla(through)
    for device_type in DEVICE_TYPES:
        if device_type.build and not torch_is_built_for(device_type.build):
            continue
        if (count := device_type.count(variables)) > 0:
            physical = device_type.count({}) if device_type.variable in variables else count
            name, label, variable = device_type.name, device_type.label, device_type.variable
            return AvailableDevices(name, label, count, cores(), physical, variable, xla=through)
    if through is not None and through.requested:
        return _of_xla(through)
    return AvailableDevices("cpu", "CPU", 0, cores(), xla=through)


def pod(chips: int) -> AvailableDevices:
    """The devices of a machine of a TPU pod that has so many chips."""
    return _of_xla(XlaDevices("TPU", chips))


def _of_xla(found: XlaDevices) -> AvailableDevices:
    return AvailableDevices("xla", found.label, found.count, cores(), xla=found)
