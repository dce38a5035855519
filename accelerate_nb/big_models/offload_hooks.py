"""Hooks that bring weights to a device for a forward, from the CPU or from disk."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.big_models import tensors
from accelerate_nb.big_models.device_map import find_tied_parameters, retie_parameters
from accelerate_nb.big_models.hooks import ModelHook, add_hook_to_module, not_compiled, remove_hook_from_module
from accelerate_nb.big_models.offload import PrefixedDataset
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints.host_copy import address, offloading_hooks
from accelerate_nb.runtime.operations.nested import find_device, send_to_device
from accelerate_nb.runtime.training.memory import clear_device_cache

# What `accelerate.hooks` offers.
__all__ = [
    "AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook", "attach_align_device_hook",
    "attach_align_device_hook_on_blocks", "attach_execution_device_hook",
]  # fmt: skip

logger = logging.getLogger("accelerate_nb.utils.modeling")


@dataclass(eq=False, repr=False)
class AlignDevicesHook(ModelHook):
    """
    Moves a module's inputs to `execution_device` before its forward, and its weights where they are not there.

    With `offload` the weights are on the `meta` device between two calls, and come from `weights_map` for each of them (by
    default from a copy on the CPU); buffers only with `offload_buffers`. With `io_same_device` the output goes where the
    input was. With `place_submodules` the hook minds the tensors of the children as well. `skip_keys` are keywords whose
    values are not moved. Tied weights that `tied_params_map` knows are brought to a device once.
    """

    execution_device: tensors.Device | None = None
    offload: bool = False
    io_same_device: bool = False
    weights_map: Mapping[str, Tensor] | None = None
    offload_buffers: bool = False
    place_submodules: bool = False
    skip_keys: str | list[str] | None = None
    tied_params_map: tensors.TiedParameters | None = None
    input_device: torch.device | None = field(default=None, init=False)
    original_devices: dict[str, torch.device] = field(default_factory=dict, init=False)
    tied_params_names: set[str] = field(default_factory=set, init=False)
    tied_pointers_to_remove: set[tuple[int, torch.device]] = field(default_factory=set, init=False)

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules")
        settings = ", ".join(f"{name}={getattr(self, name)}" for name in shown)
        return f"AlignDevicesHook({settings}, skip_keys={self.skip_keys!r})"

    def init_hook(self, module: Module) -> Module:
        if self.execution_device is not None and tensors.as_device(self.execution_device).type == "meta":
            self.tied_params_map = None  # every tensor has the same address there
        everything = tensors.all_names(module, buffers=True, recurse=self.place_submodules)
        if not self.offload:
            self._move_tensors(module, everything)
            return module
        self.original_devices = {name: tensors.tensor_of(module, name).device for name in everything}
        if self.weights_map is None:
            taken = tensors.all_names(module, buffers=self.offload_buffers, recurse=self.place_submodules)
            self.weights_map = {name: tensors.tensor_of(module, name).detach().to("cpu") for name in taken}
        for name in self._offloaded(module):
            if self.tied_params_map is not None and address(tensors.tensor_of(module, name)) in self.tied_params_map:
                self.tied_params_names.add(name)
            tensors.set_module_tensor_to_device(module, name, "meta")
        # always on the device: all buffers, or those of which no file has a copy
        if self.offload_buffers:
            staying = list(tensors.get_non_persistent_buffers(module, recurse=self.place_submodules, fqns=True))
        else:
            buffers = module.named_buffers(recurse=self.place_submodules, remove_duplicate=False)
            staying = [name for name, _ in buffers]
        self._move_tensors(module, staying)
        return module

    def _move_tensors(self, module: Module, names: Collection[str]) -> None:
        if self.execution_device is None:
            return
        tied = find_tied_parameters(module) if self.place_submodules else []
        for name in names:
            tensors.set_module_tensor_to_device(
                module, name, self.execution_device, tied_params_map=self.tied_params_map
            )
        retie_parameters(module, tied)

    def _offloaded(self, module: Module) -> list[str]:
        return tensors.all_names(
            module, buffers=self.offload_buffers, recurse=self.place_submodules, persistent_only=True
        )

    @not_compiled
    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            for name in self._offloaded(module):
                self._bring(module, name)
        if self.execution_device is None:
            return args, kwargs
        device = tensors.as_device(self.execution_device)
        moved: dict[str, Any] = send_to_device(kwargs, device, skip_keys=self.skip_keys)
        return send_to_device(args, device), moved

    def _bring(self, module: Module, name: str) -> None:
        assert self.weights_map is not None
        if self.execution_device is None:
            raise ConfigurationError(
                "An offloading hook needs an `execution_device`, where it brings weights. Pass one."
            )
        value = self.weights_map[name]
        device, pointer = tensors.as_device(self.execution_device), address(value)
        if self.tied_params_map is not None:
            if name in self.tied_params_names:
                self.tied_params_map.setdefault(pointer, {})
            if device not in self.tied_params_map.get(pointer, {device: value}):
                # it is this call that brings the weight, so it is this call that lets it go
                self.tied_pointers_to_remove.add((pointer, device))
        tensors.set_module_tensor_to_device(
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
                tensors.set_module_tensor_to_device(module, name, "meta")
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
                tensors.set_module_tensor_to_device(module, name, device, value=value, fp16_statistics=scales)
        return module


def attach_execution_device_hook(
    module: Module,
    execution_device: tensors.Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: tensors.TiedParameters | None = None,
) -> None:
    """Give every submodule with weights that has no hook one that moves its inputs, and its own tensors, to the device."""
    saved = tensors.named_module_tensors(module, recurse=True, remove_non_persistent=True)
    if not hasattr(module, "_hf_hook") and next(saved, None) is not None:
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: Module,
    execution_device: tensors.Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: tensors.TiedParameters | None = None,
) -> None:
    """
    Give every submodule that has tensors of its own an `AlignDevicesHook`, which is added to the hooks it has.

    `weights_map` has the weights by their names in the whole model, where this module is `module_name`. Modules of
    `preload_module_classes` load the weights of their children with their own, since they use them without calling them.
    """
    prefix = f"{module_name}." if module_name else ""
    is_whole = offload and type(module).__name__ in (preload_module_classes or ())
    if is_whole or next(tensors.named_module_tensors(module), None) is not None:
        hook = AlignDevicesHook(
            execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=is_whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    for name, child in () if is_whole else module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{prefix}{name}",
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: Module,
    execution_device: tensors.Device | Mapping[str, tensors.Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: tensors.TiedParameters | None = None,
) -> None:
    """
    Give each block of a model, named in `execution_device` and `offload`, the hooks that it needs.

    Either may be one value for all blocks; the empty name is the whole model, whose output goes where its input was.
    """
    shared: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    offloading = {
        **shared,
        "offload": True,
        "weights_map": weights_map,
        "offload_buffers": offload_buffers,
        "preload_module_classes": preload_module_classes,
    }
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(module, execution_device, module_name=module_name, **offloading)
        else:
            hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **shared)
            add_hook_to_module(module, hook)
        return
    devices, is_offloaded = _by_block(execution_device, offload), _by_block(offload, execution_device)
    for path, block in module.named_modules(prefix=module_name, remove_duplicate=False):
        is_root, device = path == "", devices.get(path)
        if path not in devices or path not in is_offloaded:
            if is_root:
                add_hook_to_module(block, AlignDevicesHook(device, io_same_device=True, **shared))
            continue
        if is_offloaded[path]:
            attach_align_device_hook(block, device, module_name=path, **offloading)
            if not hasattr(block, "_hf_hook"):
                add_hook_to_module(block, AlignDevicesHook(device, io_same_device=is_root, **shared))
        else:
            hook = AlignDevicesHook(
                device, io_same_device=is_root, offload_buffers=offload_buffers, place_submodules=True, **shared
            )
            add_hook_to_module(block, hook)
        if device is not None:
            attach_execution_device_hook(block, device, preload_module_classes=preload_module_classes, **shared)


def _by_block(setting: Any, other: Any) -> Mapping[str, Any]:
    """A setting of each block, which may be given as one value for all blocks of another setting."""
    return setting if isinstance(setting, Mapping) else dict.fromkeys(other, setting)


def has_offloaded_params(module: Module) -> bool:
    """Whether a hook keeps the module's weights elsewhere until its forward is called."""
    return any(True for _ in offloading_hooks(module))


@contextmanager
def align_module_device(module: Module, execution_device: tensors.Device | None = None) -> Iterator[None]:
    """
    A block in which a module's own parameters are on `execution_device`, or where its hook computes if that is left out.

    Offloaded weights are there inside of the block, and gone after it; what is written to them is lost.
    """
    hook = next(offloading_hooks(module), None)
    if hook is not None:
        usual = hook.execution_device
        hook.execution_device = usual if execution_device is None else execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = usual
        return
    if execution_device is None:
        yield
        return
    before = {name: parameter.device for name, parameter in module.named_parameters(recurse=False)}
    try:
        for name in before:
            tensors.set_module_tensor_to_device(module, name, execution_device)
        yield
    finally:
        for name, device in before.items():
            tensors.set_module_tensor_to_device(module, name, device)


class CpuOffload(ModelHook):
    """
    Keeps a model on the CPU until it is called; it stays on `execution_device` afterwards.

    The process's accelerator is the default. Before its first forward, the model of `prev_module_hook` goes to the CPU.
    """

    def __init__(
        self, execution_device: tensors.Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.execution_device = tensors.best_device() if execution_device is None else execution_device
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: Module) -> Module:
        return module.to("cpu")

    @not_compiled
    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.prev_module_hook is not None and _device_of(self.prev_module_hook.model).type != "cpu":
            self.prev_module_hook.offload()
            clear_device_cache()
        device = tensors.as_device(self.execution_device)
        if not tensors.check_device_same(_device_of(module), device):
            module.to(device)
        moved: dict[str, Any] = send_to_device(kwargs, device)
        return send_to_device(args, device), moved


@dataclass(eq=False)
class UserCpuOffloadHook:
    """A model with its hook, to send it to the CPU, or to take the hook off."""

    model: Module
    hook: ModelHook

    def offload(self) -> None:
        """Send the model to the CPU until it is called again."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: Module, execution_device: tensors.Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
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
        hook = next(offloading_hooks(module), None)
        if hook is None:
            continue
        with align_module_device(module, "cpu"):
            for name, tensor in tensors.named_module_tensors(module, recurse=bool(hook.place_submodules)):
                full = f"{path}.{name}" if path else name
                if full in state and not tensor.is_meta:
                    state[full] = tensor.detach()
    lost = [name for name, item in state.items() if isinstance(item, Tensor) and item.is_meta]
    if lost:
        logger.warning("The following tensors were not saved because they were still on meta device: %s", lost)
    return {name: item.cpu() if isinstance(item, Tensor) else item for name, item in state.items() if name not in lost}


def get_state_dict_from_offload(
    module: Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: tensors.Device | None = "cpu"
) -> dict[str, Any]:
    """The given state dict, with the weights of the module that the parameter `module_name` belongs to filled in."""
    root = module_name.rpartition(".")[0]
    device = device_to_put_offload if has_offloaded_params(module) else None
    with align_module_device(module, device):
        for name, tensor in module.state_dict().items():
            if f"{root}.{name}" in state_dict:
                state_dict[f"{root}.{name}"] = tensor
    return state_dict
