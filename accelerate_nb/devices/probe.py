"""The devices of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from accelerate_nb.devices import xla
from accelerate_nb.devices.base import AvailableDevices, DeviceType
from accelerate_nb.devices.cpu import cores
from accelerate_nb.devices.cuda import Cuda
from accelerate_nb.devices.mps import Mps
from accelerate_nb.devices.rocm import Rocm
from accelerate_nb.devices.torch_build import torch_is_built_for
from accelerate_nb.devices.xpu import Xpu

# The order is torch's own, where a machine has several kinds.
DEVICE_TYPES: tuple[DeviceType, ...] = (Cuda(), Rocm(), Xpu(), Mps())


def probe(environment: Mapping[str, str] | None = None) -> AvailableDevices:
    """
    The devices of a worker with this environment, by default this process's; no driver is woken, no torch imported.

    Accelerators that the installed torch was not built for don't count.

    >>> probe()
    AvailableDevices(kind='cuda', label='GPU', count=8, cores=96, physical=8, variable='CUDA_VISIBLE_DEVICES')
    """
    variables = os.environ if environment is None else environment
    through = _through_xla(variables)
    if through is not None and through.requested and not through.by_import:
        return _of_xla(through)
    for device_type in DEVICE_TYPES:
        if device_type.build and not torch_is_built_for(device_type.build):
            continue
        if (count := device_type.count(variables)) > 0:
            physical = device_type.count({}) if device_type.variable in variables else count
            return AvailableDevices(
                device_type.name, device_type.label, count, cores(), physical, device_type.variable, xla=through
            )
    if through is not None and through.requested:
        return _of_xla(through)
    return AvailableDevices("cpu", "CPU", 0, cores(), xla=through)


def _through_xla(variables: Mapping[str, str]) -> xla.XlaDevices | None:
    """The devices of torch_xla, with their relation to this very process."""
    found = xla.detect_devices(variables)
    if found is None:
        return None
    return replace(found, held=xla.holder_in_process(found.device), by_import=found.device == "CPU" and xla.is_loaded())


def _of_xla(found: xla.XlaDevices) -> AvailableDevices:
    return AvailableDevices("xla", found.label, found.count, cores(), xla=found)
