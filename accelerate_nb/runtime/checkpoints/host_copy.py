"""Copies of a training's state in host memory, as it is at one moment."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from accelerate_nb.runtime.operations.nested import leaves_of, mapped
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


@dataclass(eq=False)
class DeviceToHost:
    """
    Brings tensors of such a device to the CPU in one transfer, and leaves all others where they are.

    Names of one tensor are names of one on the CPU too. What is new there holds nothing before `finish`.
    """

    _coming: dict[int, tuple[Tensor, list[Tensor]]] = field(default_factory=dict)

    def nest(self, value: Any) -> Any:
        """A nest of lists, tuples and mappings with tensors of the CPU; where there are no others in it, the nest itself."""

        def is_away(leaf: Any) -> bool:
            return isinstance(leaf, Tensor) and is_apart(leaf.device)

        if not any(map(is_away, leaves_of(value, _is_sealed))):
            return value
        return mapped(lambda leaf: self.tensor(leaf) if is_away(leaf) else leaf, value, _is_sealed)

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


def _is_sealed(item: Any) -> bool:
    """Whether it is a mapping without a `copy`, which may be made in another way than from its items."""
    return isinstance(item, Mapping) and not hasattr(item, "copy")


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


@dataclass(eq=False)
class HostCopier:
    """
    Copies nested values; tensors that share memory share it in the copy too. The copies hold nothing before `finish`.

    The next copy of the same tensors goes to the same memory, since new memory costs more time than the copying: the system hands
    it out page by page, and memory that a GPU copies to has to be locked in its place.
    """

    _copied: dict[tuple[torch.device, int, int], Tensor] = field(default_factory=dict)
    _former: dict[tuple[torch.device, int, int], Tensor] = field(default_factory=dict)
    _devices: set[torch.device] = field(default_factory=set)
    _bringer: DeviceToHost = field(default_factory=DeviceToHost)

    def copy(self, value: Any) -> Any:
        """The value with all of its tensors in host memory; what is neither a tensor nor holds any is copied deeply."""
        return mapped(
            lambda leaf: self._tensor(leaf) if isinstance(leaf, Tensor) else copy.deepcopy(leaf),
            value,
            lambda item: _is_sealed(item) or (isinstance(item, (list, tuple)) and type(item) not in (list, tuple)),
        )

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
