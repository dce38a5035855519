"""The CPU cores of a process: those that are near its GPU."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

import torch

from accelerate_nb.runtime.compat.env_vars import parse_flag_from_env

_DEVICES = Path("/sys/bus/pci/devices")

_log = logging.getLogger("accelerate_nb.utils.environment")


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores near the GPU of its local rank, at the first call for this rank."""
    override_numa_affinity(local_process_index, verbose)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """
    Bind this process to the cores near the GPU of its local rank; nothing happens where there is no GPU, or none are near.

    `verbose` logs them; without it `ACCELERATE_DEBUG_MODE` decides.
    """
    if not torch.cuda.is_available():
        return
    properties: Any = torch.cuda.get_device_properties(local_process_index)
    if not hasattr(properties, "pci_bus_id"):
        return  # this torch doesn't report where its GPU sits
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    cores = near(_DEVICES / address) & os.sched_getaffinity(0)
    if not cores:
        return
    os.sched_setaffinity(0, cores)
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        _log.info("Assigning %s cpu cores to process %s: %s", len(cores), local_process_index, sorted(cores))


def near(device: Path) -> set[int]:
    """The cores that the kernel lists as local to a device; none where it lists none."""
    try:
        text = (device / "local_cpulist").read_text(encoding="ascii")
    except OSError:
        return set()
    return {core for part in text.strip().split(",") if part for core in _cores(part)}


def _cores(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
