"""A training's state in host memory: copies of it as it is at one moment, and the weights that hooks keep."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from accelerate_nb.errors import StateError
from accelerate_nb.runtime.operations.nested import leaves_of, mapped
from accelerate_nb.runtime.training.repoint import original_name
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


def memory_range(tensor: Tensor) -> tuple[Any, ...]:
    """The numbers that the tensor shows; equal for two tensors that are one."""
    return tensor.device, address(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride()


@dataclass(eq=False)
class DeviceToHost:
    """Brings tensors of such a device to the CPU in one transfer; copies, one for all names of a tensor, are empty before `finish`."""

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
    """Copies nested values; tensors that share memory share it in the copy too. The copies hold nothing before `finish`."""

    _copied: dict[tuple[torch.device, int, int], Tensor] = field(default_factory=dict)
    # The next copy goes to the same memory, since new memory costs more time than the copying: the system hands it out page by
    # page, and memory that a GPU copies to has to be locked in its place.
    _former: dict[tuple[torch.device, int, int], Tensor] = field(default_factory=dict)
    _devices: set[torch.device] = field(default_factory=set)
    _bringer: DeviceToHost = field(default_factory=DeviceToHost)

    def copy(self, value: Any) -> Any:
        """The value with all of its tensors in host memory; what is neither a tensor nor holds any is copied deeply."""
        # what a copy has left that failed, or was interrupted, is of another moment
        self._copied, self._devices, self._bringer = {}, set(), DeviceToHost()
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
        self._former = self._copied

    def _tensor(self, tensor: Tensor) -> Tensor:
        if is_apart(tensor.device):
            return self._bringer.tensor(tensor)
        is_lazy = tensor.is_conj() or tensor.is_neg()  # of which the storage's numbers are not the tensor's
        if type(tensor) not in (Tensor, Parameter) or tensor.layout != torch.strided or tensor.is_quantized or is_lazy:
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


def complete(model: Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A model's state with the weights that its hooks have, on the CPU or in files; a `StateError` names one that no hook has."""
    whole = dict(state)
    # where nothing is missing, no module is asked
    for path, module in model.named_modules(remove_duplicate=False) if any(map(is_missing, whole.values())) else ():
        prefix = original_name(f"{path}." if path else "")
        for hook in offloading_hooks(module):
            names = [name for name, value in whole.items() if is_missing(value) and name.startswith(prefix)]
            for name in names if hook.weights_map is not None else ():
                with suppress(KeyError):  # another hook's
                    found = hook.weights_map[name.removeprefix(prefix)]
                    # a file may hold wider numbers than those that the model computes with
                    whole[name] = found.to(device="cpu", dtype=whole[name].dtype)
    missing = [name for name, value in whole.items() if is_missing(value)]
    if missing:
        raise StateError(
            "You can't save the model since some parameters are on the meta device, and no hook has them: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. Load them first."
        )
    return whole


def is_missing(value: Any) -> bool:
    """Whether a weight is not in this process's memory: a hook has it, or another process."""
    return isinstance(value, Tensor) and value.is_meta


def offloading_hooks(module: Module) -> Iterator[Any]:
    """The hooks that bring a module's weights for each forward, alone or among others."""
    hook: Any = getattr(module, "_hf_hook", None)
    # decided by their attributes, so that models which Accelerate has dispatched are understood too
    for item in getattr(hook, "hooks", (hook,)):
        if getattr(item, "offload", False) is True and hasattr(item, "weights_map"):
            yield item
