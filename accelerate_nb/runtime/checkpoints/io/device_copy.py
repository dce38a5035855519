"""Copies of tensors in host memory, made together, from a device whose memory nothing else can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from accelerate_nb.runtime.checkpoints.tensor_storage import address, is_apart
from accelerate_nb.runtime.xla.device import are_computed, sync
from accelerate_nb.runtime.xla.spmd_tensors import copies_of

T = TypeVar("T")


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
        tensors = [tensor for tensor, _ in self._coming.values()]
        for copied, (_, waiting) in zip(copies_of(tensors), self._coming.values(), strict=True):
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
