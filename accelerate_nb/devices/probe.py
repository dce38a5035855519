"""What this machine has to compute with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from accelerate_nb.devices import xla
from accelerate_nb.devices.base import Devices, Kind
from accelerate_nb.devices.build import torch_is_built_for
from accelerate_nb.devices.cpu import cores
from accelerate_nb.devices.cuda import Cuda
from accelerate_nb.devices.mps import Mps
from accelerate_nb.devices.rocm import Rocm
from accelerate_nb.devices.xpu import Xpu

# The order is torch's own, where a machine has several kinds.
KINDS: tuple[Kind, ...] = (Cuda(), Rocm(), Xpu(), Mps())


def probe(environment: Mapping[str, str] | None = None) -> Devices:
    """
    What a worker with this environment, by default this process's, would find; no driver is woken, no torch imported.

    Accelerators that the installed torch was not built for don't count.

    >>> probe()
    Devices(kind='cuda', label='GPU', count=8, cores=96, physical=8, variable='CUDA_VISIBLE_DEVICES')
    """
    variables = os.environ if environment is None else environment
    through = _through_xla(variables)
    if through is not None and through.asked and not through.by_import:
        return _of_xla(through)
    for kind in KINDS:
        if kind.build and not torch_is_built_for(kind.build):
            continue
        if (count := kind.count(variables)) > 0:
            physical = kind.count({}) if kind.variable in variables else count
            return Devices(kind.name, kind.label, count, cores(), physical, kind.variable, xla=through)
    if through is not None and through.asked:
        return _of_xla(through)
    return Devices("cpu", "CPU", 0, cores(), xla=through)


def _through_xla(variables: Mapping[str, str]) -> xla.Found | None:
    """What torch_xla would compute on, with what this very process has to do with it."""
    found = xla.look(variables)
    if found is None:
        return None
    return replace(found, held=xla.held_here(found.device), by_import=found.device == "CPU" and xla.is_loaded())


def _of_xla(found: xla.Found) -> Devices:
    return Devices("xla", found.label, found.count, cores(), xla=found)
