"""Copies of a training's state in host memory, as it is at one moment."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from accelerate_nb.runtime.xla.device import are_computed, number_of, sync, to_cpu

T = TypeVar("T")


def is_apart(device: torch.device) -> bool:
    """Whether a device's memory has no addresses, and its tensors no storages that torch could share, copy or pickle."""
    return device.type == "xla"


def address(tensor: Tensor) -> int:
    """The address of the tensor's first number; on a device without addresses, the tensor's number."""
    return number_of(tensor) if is_apart(tensor.device) else tensor.data_ptr()


def storage(tensor: Tensor) -> int:
    """The address of the memory that the tensor is a part of; on a device without addresses each has its own."""
    return number_of(tensor) if is_apart(tensor.device) else tensor.untyped_storage().data_ptr()


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


class HostCopier:
    """
    Copies nested values; tensors that share memory share it in the copy too. The copies hold nothing before `finish`.

    The next copy of the same tensors goes to the same memory, since new memory costs more time than the copying: the system hands
    it out page by page, and memory that a GPU copies to has to be locked in its place.
    """

    def __init__(self) -> None:
        self._copied: dict[tuple[torch.device, int, int], Tensor] = {}
        self._former: dict[tuple[torch.device, int, int], Tensor] = {}
        self._devices: set[torch.device] = set()
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
        """Wait for what is still on its way from a device; from here on the copy before this one is no longer needed."""
        self._bringer.finish()
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()
        self._devices.clear()
        self._former, self._copied = self._copied, {}

    def _tensor(self, tensor: Tensor) -> Tensor:
        if is_apart(tensor.device):
            return self._bringer.tensor(tensor)
        if type(tensor) not in (Tensor, Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.detach().to("cpu", copy=True)
        if tensor.is_meta or tensor.numel() == 0:
            return tensor.detach()
        storage = tensor.untyped_storage()
        key = tensor.device, storage.data_ptr(), storage.nbytes()
        if key not in self._copied:
            locked = tensor.device.type in ("cuda", "xpu")
            memory = self._former.get(key)
            if memory is None:
                memory = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=locked)
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._copied[key] = memory.copy_(source, non_blocking=locked)
            self._devices |= {tensor.device} - {torch.device("cpu")}
        whole = torch.empty(0, dtype=tensor.dtype)
        return whole.set_(self._copied[key].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
