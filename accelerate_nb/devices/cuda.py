"""NVIDIA's GPUs, counted through its management library: no process becomes a user of a GPU by the query."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_LIBRARIES = {"win32": ("nvml.dll",), "linux": ("libnvidia-ml.so.1", "libnvidia-ml.so")}


class Cuda:
    """NVIDIA's GPUs, as `CUDA_VISIBLE_DEVICES` lets a process see them."""

    name = "cuda"
    label = "GPU"
    build = "cuda"
    variable = "CUDA_VISIBLE_DEVICES"

    def count(self, environment: Mapping[str, str]) -> int:
        physical = _managed()
        if physical is None:
            physical = _device_files(Path("/dev"))
        return visible(environment.get("CUDA_VISIBLE_DEVICES"), physical)


def visible(visible_devices: str | None, physical: int) -> int:
    """
    The number of `physical` GPUs that a process with this `CUDA_VISIBLE_DEVICES` sees.

    Of the slices of a GPU (MIG) CUDA gives a process only one
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables).
    """
    seen = entries(visible_devices, physical)
    return 1 if any(entry.startswith("MIG-") for entry in seen) else len(seen)


def entries(visible_devices: str | None, physical: int) -> tuple[str, ...]:
    """
    The GPUs that `CUDA_VISIBLE_DEVICES` names, by number or by UUID, in the order in which a process counts them.

    CUDA reads entries up to the first that is no GPU, and takes a GPU named twice for a mistake that leaves none.
    """
    if visible_devices is None:
        return tuple(map(str, range(physical)))
    parts = (part.strip() for part in visible_devices.split(","))
    seen = tuple(itertools.takewhile(lambda entry: _is_gpu(entry, physical), parts)) if physical else ()
    return seen if len(set(seen)) == len(seen) else ()


def _is_gpu(entry: str, physical: int) -> bool:
    if entry.isdecimal():
        return int(entry) < physical
    return entry.startswith(("GPU-", "MIG-"))


def _managed() -> int | None:
    """The number of GPUs by the management library (NVML); `None` where there is no library."""
    nvml, number = opened_library(), ctypes.c_uint(0)
    return None if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)) != 0 else number.value


@cache
def opened_library() -> ctypes.CDLL | None:
    """
    NVIDIA's management library (NVML), which comes with the driver; `None` where there is none, or it does not work.

    It is opened once a process, and stays open: that takes milliseconds, and seconds where nobody else uses the driver.
    """
    for name in _LIBRARIES.get(sys.platform, ()):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return library if library.nvmlInit_v2() == 0 else None
    return None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=opened_library.cache_clear)


def _device_files(folder: Path) -> int:
    """The number of GPUs that have a device file; a container has those that it was given."""
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in folder.glob("nvidia*"))
