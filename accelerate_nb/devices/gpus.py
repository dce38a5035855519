"""The kinds of GPUs, counted without waking a driver, and the build of the installed torch, read without importing it."""

import ast
import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_LIBRARIES = {"win32": ("nvml.dll",), "linux": ("libnvidia-ml.so.1", "libnvidia-ml.so")}
_DEVICE_FILES = Path("/dev")
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_INTEL_NODES = Path("/sys/class/drm")
_INTEL = "0x8086"


def nvidia_gpus(environment: Mapping[str, str]) -> int:
    """The number of NVIDIA's GPUs, as `CUDA_VISIBLE_DEVICES` lets a process see them."""
    nvml, number = opened_library(), ctypes.c_uint(0)
    if nvml is not None and nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)) == 0:
        physical = number.value
    else:
        # a container has the device files of the GPUs that it was given
        physical = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in _DEVICE_FILES.glob("nvidia*"))
    return visible(environment.get("CUDA_VISIBLE_DEVICES"), physical)


def visible(visible_devices: str | None, physical: int) -> int:
    """The number of `physical` GPUs that a process with this `CUDA_VISIBLE_DEVICES` sees."""
    # of the slices of a GPU (MIG) CUDA gives a process only one
    # (https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables)
    seen = entries(visible_devices, physical)
    return 1 if any(entry.startswith("MIG-") for entry in seen) else len(seen)


def entries(visible_devices: str | None, physical: int) -> tuple[str, ...]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` names, by number or by UUID, in the order in which a process counts them."""
    # CUDA reads entries up to the first that is no GPU, and takes a GPU named twice for a mistake that leaves none
    if visible_devices is None:
        return tuple(map(str, range(physical)))
    seen: list[str] = []
    for entry in map(str.strip, visible_devices.split(",") if physical else ()):
        if not (int(entry) < physical if entry.isdecimal() else entry.startswith(("GPU-", "MIG-"))):
            break
        seen.append(entry)
    return tuple(seen) if len(set(seen)) == len(seen) else ()


@cache
def opened_library() -> ctypes.CDLL | None:
    """NVIDIA's management library (NVML), which comes with the driver; `None` where there is none, or it does not work."""
    # once a process, and it stays open: that takes milliseconds, and seconds where nobody else uses the driver
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
    """Whether CUDA is in use in this process, which must not fork any more (Linux): a driver that is not loaded is not."""
    # open files don't tell: NVML opens the same devices, /dev/nvidia-uvm among them (driver 580), and a process may fork after it
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _NOT_INITIALIZED


def amd_gpus(environment: Mapping[str, str]) -> int:
    """The number of AMD's GPUs that a process sees."""
    found = 0
    for properties in _AMD_NODES.glob("*/properties"):
        # a container may not read the nodes of GPUs that it was not given; a CPU is a node too, without SIMD units
        with suppress(OSError):
            units = re.search(r"^simd_count (\d+)$", properties.read_text(encoding="ascii"), re.MULTILINE)
            found += units is not None and int(units[1]) > 0
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if variable in environment:
            found = min(found, sum(part.strip() not in {"", "-1"} for part in environment[variable].split(",")))
    return found


def intel_gpus(environment: Mapping[str, str]) -> int:
    """The number of Intel's GPUs, as `ZE_AFFINITY_MASK` lets a process see them."""
    found = 0
    for vendor in _INTEL_NODES.glob("renderD*/device/vendor"):
        with suppress(OSError):
            found += vendor.read_text(encoding="ascii").strip() == _INTEL
    mask = environment.get("ZE_AFFINITY_MASK")
    return min(found, len({entry.strip().partition(".")[0] for entry in mask.split(",")})) if mask else found


def apple_gpus(_: Mapping[str, str]) -> int:
    """The one GPU of a Mac with Apple's chip."""
    return int(sys.platform == "darwin" and platform.machine() == "arm64")


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A kind of accelerator: torch's name for it, the word for one device, and what counts those that a process sees."""

    name: str
    label: str
    count: Callable[[Mapping[str, str]], int]
    # the name in `torch.version` of a build for these devices, empty if every torch is
    build: str = ""
    # selects the devices that a process sees, empty where none does
    variable: str = ""


# The order is torch's own, where a machine has several kinds; AMD's GPUs are called "cuda" by torch, too.
DEVICE_TYPES = (
    DeviceType("cuda", "GPU", nvidia_gpus, "cuda", "CUDA_VISIBLE_DEVICES"),
    DeviceType("cuda", "GPU", amd_gpus, "hip", "CUDA_VISIBLE_DEVICES"),
    DeviceType("xpu", "XPU", intel_gpus, "xpu", "ZE_AFFINITY_MASK"),
    DeviceType("mps", "Apple GPU", apple_gpus),
)


def torch_is_built_for(name: str) -> bool:
    """Whether `torch.version.<name>` holds a version, as "cuda", "hip" and "xpu" do in builds for them."""
    return _constant(name) is not None


def torch_version() -> str | None:
    """`torch.__version__`: it ends in what the package was built for (`+cu130`), unlike the name of a package on PyPI."""
    found = _constant("__version__")
    return found if isinstance(found, str) else None


def _constant(name: str) -> object:
    """What torch's file of versions binds to a name; `None` where it binds nothing."""
    spec = find_spec("torch")
    return None if spec is None or spec.origin is None else _constants(Path(spec.origin)).get(name)


@cache
def _constants(torch: Path) -> Mapping[str, object]:
    """What the file of versions binds, beside torch's own; of what is computed, the expression."""
    try:
        statements = ast.parse(torch.with_name("version.py").read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return {}
    found: dict[str, object] = {}
    for node in statements:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = node.value.value if isinstance(node.value, ast.Constant) else node.value
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return found
