"""Hooks that bring weights to a device for a forward, from the CPU or from disk."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.big_models.device_map import find_tied_parameters, retie_parameters
from accelerate_nb.big_models.hooks import ModelHook, add_hook_to_module, not_compiled, remove_hook_from_module
from accelerate_nb.big_models.offload import PrefixedDataset
from accelerate_nb.big_models.tensors import (
    Device,
    TiedParameters,
    all_names,
    as_device,
    best_device,
    check_device_same,
    get_non_persistent_buffers,
    named_module_tensors,
    set_module_tensor_to_device,
    tensor_of,
)
from accelerate_nb.runtime.checkpoints.host_copy import address
from accelerate_nb.runtime.checkpoints.weights import offloading_hooks
from accelerate_nb.runtime.operations.nested import find_device, send_to_device
from accelerate_nb.runtime.training.memory import clear_device_cache

logger = logging.getLogger("accelerate_nb.utils.modeling")


class AlignDevicesHook(ModelHook):
    """
    Moves a module's inputs to `execution_device` before its forward, and its weights where they are not there.

    With `offload` the weights are on the `meta` device between two calls, and come from `weights_map` for each of them (by
    default from a copy on the CPU); buffers only with `offload_buffers`. With `io_same_device` the output goes where the
    input was. With `place_submodules` the hook minds the tensors of the children as well. `skip_keys` are keywords whose
    values are not moved. Tied weights that `tied_params_map` knows are brought to a device once.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedParameters | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self.tied_params_names: set[str] = set()
        self.tied_pointers_to_remove: set[tuple[int, torch.device]] = set()

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules")
        settings = ", ".join(f"{name}={getattr(self, name)}" for name in shown)
        return f"AlignDevicesHook({settings}, skip_keys={self.skip_keys!r})"

    def init_hook(self, module: Module) -> Module:
        if self.execution_device is not None and as_device(self.execution_device).type == "meta":
            self.tied_params_map = None  # every tensor has the same address there
        if self.offload:
            self._offload(module)
        elif self.execution_device is not None:
            self._move_tensors(module, all_names(module, buffers=True, recurse=self.place_submodules))
        return module

    def _move_tensors(self, module: Module, names: Collection[str]) -> None:
        assert self.execution_device is not None
        tied = find_tied_parameters(module) if self.place_submodules else []
        for name in names:
            set_module_tensor_to_device(module, name, self.execution_device, tied_params_map=self.tied_params_map)
        retie_parameters(module, tied)

    def _offload(self, module: Module) -> None:
        everything = all_names(module, buffers=True, recurse=self.place_submodules)
        self.original_devices = {name: tensor_of(module, name).device for name in everything}
        if self.weights_map is None:
            taken = all_names(module, buffers=self.offload_buffers, recurse=self.place_submodules)
            self.weights_map = {name: tensor_of(module, name).detach().to("cpu") for name in taken}
        for name in self._offloaded(module):
            if self.tied_params_map is not None and address(tensor_of(module, name)) in self.tied_params_map:
                self.tied_params_names.add(name)
            set_module_tensor_to_device(module, name, "meta")
        if self.execution_device is not None:
            self._move_tensors(module, self._staying(module))

    def _offloaded(self, module: Module) -> list[str]:
        return all_names(module, buffers=self.offload_buffers, recurse=self.place_submodules, persistent_only=True)

    def _staying(self, module: Module) -> Collection[str]:
        """The buffers that are always on the device: all, or those of which no file has a copy."""
        if self.offload_buffers:
            return get_non_persistent_buffers(module, recurse=self.place_submodules, fqns=True)
        return [name for name, _ in module.named_buffers(recurse=self.place_submodules, remove_duplicate=False)]

    @not_compiled
    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            for name in self._offloaded(module):
                self._bring(module, name)
        if self.execution_device is None:
            return args, kwargs
        device = as_device(self.execution_device)
        moved: dict[str, Any] = send_to_device(kwargs, device, skip_keys=self.skip_keys)
        return send_to_device(args, device), moved

    def _bring(self, module: Module, name: str) -> None:
        assert self.weights_map is not None
        assert self.execution_device is not None
        value = self.weights_map[name]
        device, pointer = as_device(self.execution_device), address(value)
        if self.tied_params_map is not None:
            if name in self.tied_params_names:
                self.tied_params_map.setdefault(pointer, {})
            if device not in self.tied_params_map.get(pointer, {device: value}):
                # it is this call that brings the weight, so it is this call that lets it go
                self.tied_pointers_to_remove.add((pointer, device))
        set_module_tensor_to_device(
            module,
            name,
            device,
            value=value,
            fp16_statistics=self._scales(name, value),
            tied_params_map=self.tied_params_map,
            clear_cache=False,  # the memory is used again at once: giving it back between layers only costs time
        )

    def _scales(self, name: str, value: Tensor) -> Tensor | None:
        """The scales that bitsandbytes keeps beside a weight of 8 bits."""
        scale_name = name.replace("weight", "SCB")
        if value.dtype != torch.int8 or scale_name == name or self.weights_map is None:
            return None
        return self.weights_map.get(scale_name)

    @not_compiled
    def post_forward(self, module: Module, output: Any) -> Any:
        if self.offload:
            for name in self._offloaded(module):
                set_module_tensor_to_device(module, name, "meta")
            for pointer, device in self.tied_pointers_to_remove:
                if self.tied_params_map is not None:
                    self.tied_params_map[pointer].pop(device, None)
            self.tied_pointers_to_remove = set()
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: Module) -> Module:
        for name, device in self.original_devices.items():
            if device.type != "meta":
                value = None if self.weights_map is None else self.weights_map.get(name)
                scales = None if value is None else self._scales(name, value)
                set_module_tensor_to_device(module, name, device, value=value, fp16_statistics=scales)
        return module


@dataclass(frozen=True)
class _SharedOptions:
    """The options that all hooks of one model share."""

    weights_map: Mapping[str, Tensor] | None
    offload_buffers: bool
    skip_keys: str | list[str] | None
    preload_module_classes: Collection[str]
    tied_params_map: TiedParameters | None

    def hook(self, device: Device | None, **more: Any) -> AlignDevicesHook:
        """A hook on these terms."""
        return AlignDevicesHook(
            execution_device=device, skip_keys=self.skip_keys, tied_params_map=self.tied_params_map, **more
        )

    def is_loaded_whole(self, module: Module) -> bool:
        """Whether a module uses the weights of its children without calling them."""
        return type(module).__name__ in self.preload_module_classes


def attach_execution_device_hook(
    module: Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParameters | None = None,
) -> None:
    """Give every submodule with weights that has no hook one that moves its inputs, and its own tensors, to the device."""
    terms = _SharedOptions(None, False, skip_keys, preload_module_classes or (), tied_params_map)
    _attach_execution(module, execution_device, terms)


def _attach_execution(module: Module, device: Device, terms: _SharedOptions) -> None:
    saved = named_module_tensors(module, recurse=True, remove_non_persistent=True)
    if not hasattr(module, "_hf_hook") and next(saved, None) is not None:
        add_hook_to_module(module, terms.hook(device))
    if terms.is_loaded_whole(module):
        return
    for child in module.children():
        _attach_execution(child, device, terms)


def attach_align_device_hook(
    module: Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParameters | None = None,
) -> None:
    """
    Give every submodule that has tensors of its own an `AlignDevicesHook`, which is added to the hooks it has.

    `weights_map` has the weights by their names in the whole model, where this module is `module_name`. Modules of
    `preload_module_classes` load the weights of their children with their own, since they use them without calling them.
    """
    terms = _SharedOptions(weights_map, offload_buffers, skip_keys, preload_module_classes or (), tied_params_map)
    _attach_aligned(module, module_name, execution_device, offload, terms)


def _attach_aligned(module: Module, name: str, device: Device | None, offload: bool, terms: _SharedOptions) -> None:
    whole = offload and terms.is_loaded_whole(module)
    if whole or next(named_module_tensors(module), None) is not None:
        weights = None if terms.weights_map is None else PrefixedDataset(terms.weights_map, f"{name}." if name else "")
        hook = terms.hook(
            device, offload=offload, weights_map=weights, offload_buffers=terms.offload_buffers, place_submodules=whole
        )
        add_hook_to_module(module, hook, append=True)
    if whole:
        return
    for child_name, child in module.named_children():
        _attach_aligned(child, _inside(name, child_name), device, offload, terms)


def attach_align_device_hook_on_blocks(
    module: Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParameters | None = None,
) -> None:
    """
    Give each block of a model, named in `execution_device` and `offload`, the hooks that it needs.

    Either may be one value for all blocks; the empty name is the whole model, whose output goes where its input was.
    """
    terms = _SharedOptions(weights_map, offload_buffers, skip_keys, preload_module_classes or (), tied_params_map)
    if isinstance(execution_device, Mapping) or isinstance(offload, Mapping):
        _attach_on_blocks(module, module_name, _blocks(execution_device, offload), terms)
    elif offload:
        _attach_aligned(module, module_name, execution_device, True, terms)
    else:
        add_hook_to_module(module, terms.hook(execution_device, io_same_device=True, place_submodules=True))


@dataclass(frozen=True)
class _BlockDevices:
    """The device on which each named block computes, and whether its weights stay elsewhere."""

    execution: Mapping[str, Device | None]
    offload: Mapping[str, bool]


def _blocks(execution: Device | Mapping[str, Device] | None, offload: bool | Mapping[str, bool]) -> _BlockDevices:
    if not isinstance(execution, Mapping):
        assert isinstance(offload, Mapping)
        return _BlockDevices(dict.fromkeys(offload, execution), offload)
    return _BlockDevices(execution, offload if isinstance(offload, Mapping) else dict.fromkeys(execution, offload))


def _attach_on_blocks(module: Module, name: str, blocks: _BlockDevices, terms: _SharedOptions) -> None:
    is_root = name == ""
    device = blocks.execution.get(name)
    if name in blocks.execution and name in blocks.offload:
        if blocks.offload[name]:
            _attach_aligned(module, name, device, True, terms)
            if not hasattr(module, "_hf_hook"):
                add_hook_to_module(module, terms.hook(device, io_same_device=is_root))
        else:
            hook = terms.hook(
                device, offload_buffers=terms.offload_buffers, io_same_device=is_root, place_submodules=True
            )
            add_hook_to_module(module, hook)
        if device is not None:
            _attach_execution(module, device, terms)
    elif is_root:
        add_hook_to_module(module, terms.hook(device, io_same_device=True))
    for child_name, child in module.named_children():
        _attach_on_blocks(child, _inside(name, child_name), blocks, terms)


def _inside(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def offloading_hook(module: Module) -> Any:
    """The hook that brings a module's weights for each forward, alone or among others; `None` where there is none."""
    return next(offloading_hooks(module), None)


def has_offloaded_params(module: Module) -> bool:
    """Whether a hook keeps the module's weights elsewhere until its forward is called."""
    return offloading_hook(module) is not None


@contextmanager
def align_module_device(module: Module, execution_device: Device | None = None) -> Iterator[None]:
    """
    A block in which a module's own parameters are on `execution_device`, or where its hook computes if that is left out.

    Offloaded weights are there inside of the block, and gone after it; what is written to them is lost.
    """
    hook = offloading_hook(module)
    if hook is not None:
        with _brought(module, hook, execution_device):
            yield
    elif execution_device is None:
        yield
    else:
        before = {name: parameter.device for name, parameter in module.named_parameters(recurse=False)}
        try:
            for name in before:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, device in before.items():
                set_module_tensor_to_device(module, name, device)


@contextmanager
def _brought(module: Module, hook: Any, device: Device | None) -> Iterator[None]:
    usual = hook.execution_device
    hook.execution_device = usual if device is None else device
    try:
        hook.pre_forward(module)
        yield
    finally:
        hook.post_forward(module, None)
        hook.execution_device = usual


# ------------------------------------------------------------------------------------------------------- whole models


class CpuOffload(ModelHook):
    """
    Keeps a model on the CPU until it is called; it stays on `execution_device` afterwards.

    The first accelerator is the default. Before its first forward, the model of `prev_module_hook` goes to the CPU.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.execution_device = best_device() if execution_device is None else execution_device
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: Module) -> Module:
        return module.to("cpu")

    @not_compiled
    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.prev_module_hook is not None and _device_of(self.prev_module_hook.model).type != "cpu":
            self.prev_module_hook.offload()
            clear_device_cache()
        device = as_device(self.execution_device)
        if check_device_same(_device_of(module), device):
            return args, kwargs
        module.to(device)
        moved: dict[str, Any] = send_to_device(kwargs, device)
        return send_to_device(args, device), moved


class UserCpuOffloadHook:
    """A model with its hook, to send it to the CPU, or to take the hook off."""

    def __init__(self, model: Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model to the CPU until it is called again."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: Module, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[Module, UserCpuOffloadHook]:
    """
    Keep a model on the CPU until it is called; it then stays on the device until the hook that is returned sends it back.

    Models in a chain take turns: each gets the hook of the one before it, whose model goes when this one is called.

    >>> encoder, first = cpu_offload_with_hook(encoder)
    >>> decoder, second = cpu_offload_with_hook(decoder, prev_module_hook=first)
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def _device_of(model: Module) -> Any:
    return next(model.parameters()).device


def get_state_dict_offloaded_model(model: Module) -> dict[str, Any]:
    """All weights of a model on the CPU, those that are offloaded too, under the names of its state dict."""
    state = dict(model.state_dict())
    for path, module in model.named_modules(remove_duplicate=False):
        if has_offloaded_params(module):
            state.update({name: item for name, item in _brought_tensors(path, module).items() if name in state})
    lost = [name for name, item in state.items() if isinstance(item, Tensor) and item.is_meta]
    if lost:
        logger.warning("The following tensors were not saved because they were still on meta device: %s", lost)
    return {name: item.cpu() if isinstance(item, Tensor) else item for name, item in state.items() if name not in lost}


def _brought_tensors(path: str, module: Module) -> dict[str, Tensor]:
    prefix = f"{path}." if path else ""
    with align_module_device(module, "cpu"):
        tensors = list(named_module_tensors(module, recurse=bool(offloading_hook(module).place_submodules)))
    return {f"{prefix}{name}": tensor.detach() for name, tensor in tensors if not tensor.is_meta}


def get_state_dict_from_offload(
    module: Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Device | None = "cpu"
) -> dict[str, Any]:
    """The given state dict, with the weights of the module that the parameter `module_name` belongs to filled in."""
    root = module_name.rpartition(".")[0]
    device = device_to_put_offload if has_offloaded_params(module) else None
    with align_module_device(module, device):
        for name, tensor in module.state_dict().items():
            if f"{root}.{name}" in state_dict:
                state_dict[f"{root}.{name}"] = tensor
    return state_dict
