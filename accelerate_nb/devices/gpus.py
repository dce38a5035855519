"""The kinds of GPUs, counted without waking a driver: no process becomes a user of a GPU by the query."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
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

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of cuda.h


def cuda_is_awake() -> bool:
    """
    Whether CUDA is in use in this process, which must not fork any more (Linux): a driver that is not loaded is not.

    Open files don't tell: NVML opens the same devices, /dev/nvidia-uvm among them (driver 580), and a process may fork after it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _NOT_INITIALIZED


def _device_files(folder: Path) -> int:
    """The number of GPUs that have a device file; a container has those that it was given."""
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in folder.glob("nvidia*"))


_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


class Rocm:
    """AMD's GPUs, which torch calls "cuda" too."""

    name = "cuda"
    label = "GPU"
    build = "hip"
    variable = "CUDA_VISIBLE_DEVICES"

    def count(self, environment: Mapping[str, str]) -> int:
        found = amd_gpus(_AMD_NODES)
        for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
            if variable in environment:
                named = [part for part in environment[variable].split(",") if part.strip() not in {"", "-1"}]
                found = min(found, len(named))
        return found


def amd_gpus(nodes: Path) -> int:
    """The number of the driver's nodes that compute: a CPU is a node too, without SIMD units."""
    count = 0
    for properties in nodes.glob("*/properties"):
        try:
            units = re.search(r"^simd_count (\d+)$", properties.read_text(encoding="ascii"), re.MULTILINE)
        except OSError:
            continue  # a container may not read the nodes of GPUs that it was not given
        count += units is not None and int(units[1]) > 0
    return count


_INTEL_NODES = Path("/sys/class/drm")
_INTEL = "0x8086"


class Xpu:
    """Intel's GPUs, as `ZE_AFFINITY_MASK` lets a process see them."""

    name = "xpu"
    label = "XPU"
    build = "xpu"
    variable = "ZE_AFFINITY_MASK"

    def count(self, environment: Mapping[str, str]) -> int:
        found = intel_gpus(_INTEL_NODES)
        mask = environment.get("ZE_AFFINITY_MASK")
        if not mask:
            return found
        return min(found, len({entry.strip().partition(".")[0] for entry in mask.split(",")}))


def intel_gpus(nodes: Path) -> int:
    """The number of render nodes of Intel."""
    return sum(_vendor(node) == _INTEL for node in nodes.glob("renderD*"))


def _vendor(node: Path) -> str:
    try:
        return (node / "device" / "vendor").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Mps:
    """The one GPU of such a Mac."""

    name = "mps"
    label = "Apple GPU"
    build = ""
    variable = ""

    def count(self, environment: Mapping[str, str]) -> int:
        return int(sys.platform == "darwin" and platform.machine() == "arm64")
