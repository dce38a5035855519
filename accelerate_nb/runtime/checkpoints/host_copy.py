"""Copies of a training's state in host memory, as it is at one moment."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from accelerate_nb.runtime.xla import device as xla
from accelerate_nb.runtime.xla.device import are_computed, sync, to_cpu

T = TypeVar("T")
# Memory comes in pieces of at least so many bytes, and its content begins where any type of number may begin.
_PIECE = 64 << 20
_ALIGNED = 64
_THREADS = 4


def is_apart(device: torch.device) -> bool:
    """Whether a device's memory has no addresses, and its tensors no storages that torch could share, copy or pickle."""
    return device.type == "xla"


def address(tensor: Tensor) -> int:
    """The address of the tensor's first number; on a device without addresses, the tensor's number."""
    return xla.number_of(tensor) if is_apart(tensor.device) else tensor.data_ptr()


def storage(tensor: Tensor) -> int:
    """The address of the memory that the tensor is a part of; on a device without addresses each has its own."""
    return xla.number_of(tensor) if is_apart(tensor.device) else tensor.untyped_storage().data_ptr()


class DeviceToHost:
    """
    Brings tensors of such a device to the CPU in one transfer, and leaves all others where they are.

    Names of one tensor are names of one on the CPU too. What is new there holds nothing before `finish`.
    """

    def __init__(self) -> None:
        self._coming: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def nest(self, value: Any) -> Any:
        """A nest of lists, tuples and mappings with tensors of the CPU; where there are no others in it, the nest itself."""
        if isinstance(value, Tensor):
            return self.tensor(value) if is_apart(value.device) else value
        if isinstance(value, (list, tuple)):
            parts = [self.nest(item) for item in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, Mapping) and hasattr(value, "copy"):
            items = {key: self.nest(item) for key, item in value.items()}
            return value if all(items[key] is item for key, item in value.items()) else with_items(value, items)
        return value

    def tensor(self, tensor: Tensor) -> Tensor:
        """The future copy of a tensor of such a device."""
        new = torch.empty(0, dtype=tensor.dtype)
        if isinstance(tensor, Parameter):
            new = Parameter(new, tensor.requires_grad)
        self._coming.setdefault(address(tensor), (tensor, []))[1].append(new)
        return new

    def settle(self) -> None:
        """Have the device compute what it has not computed of the numbers."""
        tensors = [tensor for tensor, _ in self._coming.values()]
        if tensors and not are_computed(tensors):
            sync()

    def finish(self) -> None:
        """Bring the numbers."""
        if not self._coming:
            return
        tensors = [tensor.detach() for tensor, _ in self._coming.values()]
        for copied, (_, waiting) in zip(to_cpu(tensors), self._coming.values(), strict=True):
            for item in waiting:
                item.data = copied
        self._coming.clear()


def with_items(mapping: Any, items: Mapping[Any, Any]) -> Any:
    """A mapping with other items: a state_dict's kind, and what it carries besides them, stay as they are."""
    same = mapping.copy()
    for key, item in items.items():
        same[key] = item
    return same


def settle(value: Any) -> None:
    """Have such a device compute what is in the value, before some process reads it; all processes call it."""
    bringer = DeviceToHost()
    bringer.nest(value)
    bringer.settle()


def brought(value: T) -> T:
    """The value with all of its tensors where they can be written to a file."""
    bringer = DeviceToHost()
    nest: T = bringer.nest(value)
    bringer.finish()
    return nest


def large_memory(size: int) -> mmap.mmap:
    """Memory that begins with a page, in huge pages where the system has them: touching it first is what costs most."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system that was built without
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class HostMemory:
    """
    Host memory for copies, which is used again for the next copy.

    New memory costs more time than the copying: the system hands it out page by page, and memory that a GPU copies to has to
    be locked in its place.
    """

    def __init__(self) -> None:
        self._pieces: dict[bool, list[Tensor]] = {}
        self._used: dict[bool, list[int]] = {}

    def take(self, size: int, *, pinned: bool) -> Tensor:
        """`size` bytes, as a tensor of that many; they are taken until `give_back`."""
        pieces, used = self._pieces.setdefault(pinned, []), self._used.setdefault(pinned, [])
        for number, piece in enumerate(pieces):
            if used[number] + size <= len(piece):
                break
        else:
            number = len(pieces)
            pieces.append(_new(max(size, _PIECE), pinned=pinned))
            used.append(0)
        start = used[number]
        used[number] += -(-size // _ALIGNED) * _ALIGNED
        # a storage of its own: saving a tensor saves all that is in its storage
        return torch.frombuffer(pieces[number].numpy().data, dtype=torch.uint8, count=size, offset=start)

    def give_back(self) -> None:
        """Whatever was taken may be taken again; what the last copy did not use is released."""
        for pinned, used in self._used.items():
            self._pieces[pinned] = [piece for piece, size in zip(self._pieces[pinned], used, strict=True) if size]
            self._used[pinned] = [0] * len(self._pieces[pinned])


def _new(size: int, *, pinned: bool) -> Tensor:
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(large_memory(size), dtype=torch.uint8)


class HostCopier:
    """Copies nested values; tensors that share memory share it in the copy too. The copies hold nothing before `finish`."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._copied: dict[tuple[torch.device, int], Tensor] = {}
        self._devices: set[torch.device] = set()
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._bringer = DeviceToHost()

    def copy(self, value: Any) -> Any:
        """The value with all of its tensors in host memory; what is neither a tensor nor holds any is copied deeply."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if value is None or type(value) in (int, float, str, bytes, bool):
            return value
        if type(value) is list:
            return [self.copy(item) for item in value]
        if type(value) is tuple:
            return tuple(self.copy(item) for item in value)
        if isinstance(value, Mapping) and hasattr(value, "copy"):
            return with_items(value, {key: self.copy(item) for key, item in value.items()})
        return copy.deepcopy(value)

    def finish(self) -> None:
        """Copy what is in host memory already, and wait for what is still on its way from a device."""
        self._bringer.finish()
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="accelerate_nb copy") as pool:
            for _ in pool.map(lambda pair: pair[0].copy_(pair[1]), self._waiting):
                pass
        self._waiting.clear()
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()
        self._devices.clear()

    def _tensor(self, tensor: Tensor) -> Tensor:
        if is_apart(tensor.device):
            return self._bringer.tensor(tensor)
        if type(tensor) not in (Tensor, Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.detach().to("cpu", copy=True)
        if tensor.is_meta or tensor.numel() == 0:
            return tensor.detach()
        memory = self._storage(tensor)
        whole = torch.empty(0, dtype=tensor.dtype)
        return whole.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def _storage(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = tensor.device, storage.data_ptr()
        if key not in self._copied:
            locked = tensor.device.type in ("cuda", "xpu")
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copied = self._memory.take(storage.nbytes(), pinned=locked)
            if tensor.device.type == "cpu":
                self._waiting.append((copied, source))
            else:
                copied.copy_(source, non_blocking=locked)
                self._devices.add(tensor.device)
            self._copied[key] = copied
        return self._copied[key]
