"""The load of NVIDIA's GPUs by the management library: no process becomes a user of a GPU by the query."""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from accelerate_nb.devices.gpus import entries, opened_library
from accelerate_nb.devices.usage import DeviceGauge, RankProcesses
from accelerate_nb.events.event_types import DeviceSample

# Names and UUIDs have at most so many characters.
_LONGEST_TEXT = 96


class _NvmlUtilization(ctypes.Structure):
    """`nvmlUtilization_t` of nvml.h."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _NvmlMemory(ctypes.Structure):
    """`nvmlMemory_t` of nvml.h."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class GpuGauge(DeviceGauge):
    """The GPUs that a process with an environment sees, in its order, until `close`; none where there is no such library."""

    # CUDA counts the fastest GPU first, and the library by slots: with unlike GPUs they agree with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.

    def __init__(self, environment: Mapping[str, str], nvml: Any = None) -> None:
        self._nvml: Any = nvml or opened_library()
        self._handles = [] if self._nvml is None else self._seen(environment.get("CUDA_VISIBLE_DEVICES"))

    def samples(self, ranks: RankProcesses, now: float) -> Iterator[DeviceSample]:
        return (known for rank in range(ranks.size) if (known := self.sample(rank, now)) is not None)

    def sample(self, rank: int, now: float) -> DeviceSample | None:
        """The load of a rank's GPU; `None` where none of it is known."""
        if rank >= len(self._handles) or (handle := self._handles[rank]) is None:
            return None
        busy, memory = _NvmlUtilization(), _NvmlMemory()
        # a slice of a GPU (MIG) knows its memory, and not how busy it is
        knows_busy = self._nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(busy)) == 0
        knows_memory = self._nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        utilisation = float(busy.gpu) if knows_busy else None
        used, total = (int(memory.used), int(memory.total)) if knows_memory else (None, None)
        return DeviceSample(rank, f"cuda:{rank}", utilisation, used, total, now)

    def memory_sizes(self) -> list[int]:
        """The memory of each GPU where that is known, in bytes."""
        samples = (self.sample(number, 0.0) for number in range(len(self._handles)))
        return [sample.memory_total for sample in samples if sample is not None and sample.memory_total]

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of all of these GPUs, as (9, 0); `None` where they differ, or it is not known."""
        found = set()
        for handle in self._handles:
            major, minor = ctypes.c_int(), ctypes.c_int()
            if handle is None or self._nvml.nvmlDeviceGetCudaComputeCapability(
                handle, ctypes.byref(major), ctypes.byref(minor)
            ):
                return None
            found.add((major.value, minor.value))
        return found.pop() if len(found) == 1 else None

    def close(self) -> None:
        self._handles = []

    def _seen(self, visible_devices: str | None) -> list[ctypes.c_void_p | None]:
        number = ctypes.c_uint(0)
        if self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)) != 0:
            return []
        every = [self._handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index)) for index in range(number.value)]
        found: list[ctypes.c_void_p | None] = []
        for entry in entries(visible_devices, number.value):
            if entry.isdecimal():
                found.append(every[int(entry)])
            elif entry.startswith("MIG-"):
                found.append(self._handle("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(entry.encode())))
            else:
                # the beginning of a UUID is enough for CUDA
                uuid = self._nvml.nvmlDeviceGetUUID
                named = (item for item in every if item and _text(partial(uuid, item)).startswith(entry))
                found.append(next(named, None))
        return found

    def _handle(self, function: str, which: Any) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        return handle if getattr(self._nvml, function)(which, ctypes.byref(handle)) == 0 else None


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's version, the newest CUDA that it runs, and the name and bytes of each GPU, whether shown to processes or not."""

    version: str
    cuda: str
    gpus: tuple[tuple[str, int], ...]


# GPUs without peer-to-peer transfers, and the driver that reports it to NCCL; an older one lets it hang.
_WITHOUT_PEERS = "RTX 40"
_DRIVER_THAT_KNOWS = (550, 40, 7)


def may_send_directly(names: Sequence[str], version: str) -> bool:
    """Whether NCCL may send directly from one of the GPUs of these names to another, with a driver of this version."""
    if len(names) < 2 or not any(_WITHOUT_PEERS in name for name in names):
        return True
    parts = version.split(".")
    # nothing is known against a version that reads otherwise
    return not all(map(str.isdecimal, parts)) or tuple(map(int, parts)) >= _DRIVER_THAT_KNOWS


def driver() -> Driver | None:
    """The facts of the driver; `None` where there is none."""
    nvml = opened_library()
    if nvml is None:
        return None
    cuda, gpus = ctypes.c_int(0), []
    nvml.nvmlSystemGetCudaDriverVersion(ctypes.byref(cuda))
    # a container has no handle of a GPU that it was not given
    for handle in (handle for handle in GpuGauge({}, nvml)._handles if handle is not None):
        memory = _NvmlMemory()
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        gpus.append((_text(partial(nvml.nvmlDeviceGetName, handle)), int(memory.total)))
    return Driver(
        version=_text(nvml.nvmlSystemGetDriverVersion),
        cuda=f"{cuda.value // 1000}.{cuda.value % 1000 // 10}" if cuda.value else "",
        gpus=tuple(gpus),
    )


def _text(query: Callable[..., int]) -> str:
    """A text that a function of the library writes into a buffer of a length."""
    text = ctypes.create_string_buffer(_LONGEST_TEXT)
    return text.value.decode(errors="replace") if query(text, ctypes.c_uint(_LONGEST_TEXT)) == 0 else ""
