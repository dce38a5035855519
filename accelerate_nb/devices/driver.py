"""What NVIDIA's driver says of itself, asked of the management library: no process becomes a user of a GPU by asking it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate_nb.devices.cuda import library

_LONGEST_NAME = 96


class _Memory(ctypes.Structure):
    """`nvmlMemory_t` of nvml.h."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine, whether processes are to see it or not; `memory` in bytes."""

    name: str
    memory: int


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's version, the newest CUDA that it runs, and the GPUs of this machine."""

    version: str
    cuda: str
    gpus: tuple[Gpu, ...]


def driver(nvml: Any = None) -> Driver | None:
    """What the driver says; `None` where there is none."""
    nvml = library() if nvml is None else nvml
    if nvml is None or nvml.nvmlInit_v2() != 0:
        return None
    try:
        cuda = ctypes.c_int(0)
        nvml.nvmlSystemGetCudaDriverVersion(ctypes.byref(cuda))
        return Driver(
            version=_text(nvml.nvmlSystemGetDriverVersion),
            cuda=f"{cuda.value // 1000}.{cuda.value % 1000 // 10}" if cuda.value else "",
            gpus=_gpus(nvml),
        )
    finally:
        nvml.nvmlShutdown()


def _gpus(nvml: Any) -> tuple[Gpu, ...]:
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    found = []
    for index in range(count.value):
        handle, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
            continue  # one that this container was not given
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        name = _text(lambda text, size, handle=handle: nvml.nvmlDeviceGetName(handle, text, size))  # type: ignore[misc]
        found.append(Gpu(name, int(memory.total)))
    return tuple(found)


def _text(ask: Callable[[Any, ctypes.c_uint], int]) -> str:
    """A text that a function of the library puts where it is told."""
    text = ctypes.create_string_buffer(_LONGEST_NAME)
    return text.value.decode(errors="replace") if ask(text, ctypes.c_uint(_LONGEST_NAME)) == 0 else ""
