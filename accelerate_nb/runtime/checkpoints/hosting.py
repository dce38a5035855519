"""Copies of a training's state in host memory, as it is at one moment."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


class HostMemory:
    """
    Host memory for copies, which is used again for the next copy of the same size.

    New memory costs more time than the copying: the system hands it out page by page, and memory that a GPU copies to has to
    be locked in its place.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[Tensor]] = {}
        self._taken: list[tuple[tuple[int, bool], Tensor]] = []

    def take(self, size: int, *, pinned: bool) -> Tensor:
        """`size` bytes, as a tensor of that many; they are taken until `give_back`."""
        kind = size, pinned
        free = self._free.get(kind)
        memory = free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._taken.append((kind, memory))
        return memory

    def give_back(self) -> None:
        """Whatever was taken may be taken again; what the last copy had no use for is let go of."""
        self._free = {}
        for kind, memory in self._taken:
            self._free.setdefault(kind, []).append(memory)
        self._taken = []


class Copier:
    """Copies nested values; tensors that share memory share it in the copy too."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._copied: dict[tuple[torch.device, int], Tensor] = {}
        self._devices: set[torch.device] = set()

    def copy(self, value: Any) -> Any:
        """The value with all of its tensors in host memory; what is neither a tensor nor holds any is copied deeply."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) is list:
            return [self.copy(each) for each in value]
        if type(value) is tuple:
            return tuple(self.copy(each) for each in value)
        if isinstance(value, Mapping) and hasattr(value, "copy"):
            # a state_dict's kind, and what it carries besides its items, stay as they are
            same = value.copy()
            for key, each in value.items():
                same[key] = self.copy(each)
            return same
        return copy.deepcopy(value)

    def finish(self) -> None:
        """Wait for what is still on its way from a device."""
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()
        self._devices.clear()

    def _tensor(self, tensor: Tensor) -> Tensor:
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
            copied.copy_(source, non_blocking=locked)
            if locked:
                self._devices.add(tensor.device)
            self._copied[key] = copied
        return self._copied[key]
