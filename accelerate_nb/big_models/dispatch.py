"""Models that run though their weights are on several devices, in the CPU's memory or on the disk."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.big_models import offload_hooks, tensors
from accelerate_nb.big_models.device_map import (
    check_device_map,
    check_devices,
    covering,
    find_tied_parameters,
    retie_parameters,
)
from accelerate_nb.big_models.hooks import GUARDED, TIES, add_hook_to_module
from accelerate_nb.big_models.offload import (
    Folder,
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    offload_state_dict,
    read_offload_index,
)
from accelerate_nb.errors import CheckpointError, ConfigurationError, StateError
from accelerate_nb.runtime.checkpoints.host_copy import address
from accelerate_nb.runtime.compat.packages import is_bnb_available
from accelerate_nb.user_warnings import warn_user

logger = logging.getLogger("accelerate_nb.big_modeling")


def cpu_offload(
    model: Module,
    execution_device: tensors.Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> Module:
    """
    Keep a model's weights on the CPU; each layer's come to `execution_device` for its forward and go again.

    That device is the one of the first parameter by default. `state_dict` has the weights, if not the model.
    """
    if state_dict is None:
        state_dict = {name: tensor.to("cpu") for name, tensor in model.state_dict().items()}
    return _offload_all(model, execution_device, offload_buffers, state_dict, preload_module_classes)


def disk_offload(
    model: Module,
    offload_dir: Folder,
    execution_device: tensors.Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> Module:
    """
    Keep a model's weights in a folder; each layer's come to `execution_device` for its forward and go again.

    Weights that the model has are written, replacing those in the folder; weights on the `meta` device must be there.
    """
    weights = OffloadedWeightsLoader(save_folder=_written(model.state_dict(), offload_dir))
    return _offload_all(model, execution_device, offload_buffers, weights, preload_module_classes)


def _offload_all(
    model: Module,
    device: tensors.Device | None,
    buffers: bool,
    weights: Mapping[str, Tensor],
    preload_module_classes: list[str] | None,
) -> Module:
    device = next(model.parameters()).device if device is None else device
    model.__dict__[TIES] = find_tied_parameters(model)
    add_hook_to_module(model, offload_hooks.AlignDevicesHook(io_same_device=True), append=True)
    offload_hooks.attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        offload_buffers=buffers,
        weights_map=weights,
        preload_module_classes=preload_module_classes,
    )
    return model


def dispatch_model(
    model: Module,
    device_map: tensors.DeviceMap,
    main_device: tensors.Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> Module:
    """
    Put each part of a model on the device that `device_map` has for it, and let it run as if it were on one.

    Parts on the `cpu` beside accelerators, and parts on `disk`, come to `main_device` (the map's first accelerator) for their
    forward. What goes to the disk is written to `offload_dir`, unless it is there, or in `offload_index`. A map with
    one device just moves the model, unless `force_hooks` or a bitsandbytes whose models can't be moved. Raises a `ConfigurationError` that names the modules without a
    device.

    >>> model = dispatch_model(model, {"encoder": 0, "decoder": "cpu"})
    """
    check_device_map(model, device_map)
    check_devices(device_map)
    devices = list(dict.fromkeys(device_map.values()))
    # models of an older bitsandbytes can't be moved
    force_hooks |= getattr(model, "is_loaded_in_8bit", False) and not is_bnb_available("0.48.0")
    force_hooks |= getattr(model, "is_loaded_in_4bit", False) and not is_bnb_available("0.43.2")
    if len(devices) > 1 or tensors.DISK in devices or force_hooks:
        if main_device is None:
            main_device = next((device for device in devices if device not in ("cpu", tensors.DISK)), "cpu")
        weights = _weights(model, device_map, main_device, state_dict, offload_dir, offload_index)
        terms: dict[str, Any] = {"offload_buffers": offload_buffers, "skip_keys": skip_keys, "weights_map": weights}
        _attach(model, device_map, main_device, terms, preload_module_classes)
        # the methods that move the model as a whole warn now
        for name in ("to", tensors.accelerator() or "cuda"):
            if name in GUARDED and hasattr(type(model), name):
                # a partial, not a closure: a deep copy of the model moves the copy
                guarded = functools.partial(_move_guarded, model, name)
                model.__dict__[name] = functools.update_wrapper(guarded, getattr(type(model), name))
    else:
        model.to(tensors.as_device(devices[0]))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]  # where transformers and others read it
    return model


def _is_offloaded(device: tensors.Device, main: tensors.Device) -> bool:
    """Whether what a map has on a device comes to the main one for its forward."""
    # the CPU's memory is main memory already where there is no accelerator, or one that shares it
    return device == tensors.DISK or (device == "cpu" and main not in ("cpu", "mps"))


def _weights(
    model: Module,
    device_map: tensors.DeviceMap,
    main: tensors.Device,
    state_dict: Mapping[str, Tensor] | None,
    folder: Folder | None,
    index: Mapping[str, Any] | None,
) -> Mapping[str, Tensor] | None:
    """The source of offloaded weights; `None` where nothing is offloaded."""
    on_cpu = [name for name, device in device_map.items() if device == "cpu" and _is_offloaded(device, main)]
    on_disk = [name for name, device in device_map.items() if device == tensors.DISK]
    if state_dict is None and on_cpu:
        weights = extract_submodules_state_dict(model.state_dict(), on_cpu)
        state_dict = {name: tensor.to("cpu") for name, tensor in weights.items()}
    if on_disk and index is None:
        if folder is None:
            raise ConfigurationError(
                "The device_map puts parts of this model on disk, and no folder was given for them. Pass `offload_dir`; the "
                f"following submodules need to be offloaded: {', '.join(name or 'the whole model' for name in on_disk)}."
            )
        _written(extract_submodules_state_dict(model.state_dict(), on_disk), folder)
    folder = folder if on_disk else None
    if state_dict is None and folder is None and index is None:
        return None
    device = None if index is None else main
    return OffloadedWeightsLoader(state_dict=state_dict, save_folder=folder, index=index, device=device)


def _written(weights: Mapping[str, Tensor], folder: Folder) -> Folder:
    """The folder, after the weights in memory were written; the others must be there."""
    in_memory = {name: tensor for name, tensor in weights.items() if not tensor.is_meta}
    known = read_offload_index(folder) if len(in_memory) < len(weights) else {}
    missing = [name for name in weights if name not in in_memory and name not in known]
    if missing:
        raise CheckpointError(
            f"{folder} should hold the weights that are not in memory, but has none for {', '.join(missing)}. "
            "Load the model's checkpoint with this `offload_folder`, or pass the folder into which it was loaded."
        )
    if in_memory:
        # also over an older copy: a model that was trained since must not run with the weights of before
        offload_state_dict(folder, in_memory)
    return folder


def _attach(
    model: Module,
    device_map: tensors.DeviceMap,
    main: tensors.Device,
    terms: dict[str, Any],
    preload_module_classes: list[str] | None,
) -> None:
    tied = find_tied_parameters(model)
    model.__dict__[TIES] = tied
    tied_weights = (tensors.tensor_of(model, name) for group in tied for name in group)
    shared_copies: tensors.TiedParameters = {address(weight): {} for weight in tied_weights if not weight.is_meta}
    execution = {name: main if device in ("cpu", tensors.DISK) else device for name, device in device_map.items()}
    offload = {name: _is_offloaded(device, main) for name, device in device_map.items()}
    offload_hooks.attach_align_device_hook_on_blocks(
        model,
        execution_device={**execution, "": main},
        offload=offload,
        preload_module_classes=preload_module_classes,
        tied_params_map=shared_copies,
        **terms,
    )
    _attach_to_split(model, main, execution, offload, terms)
    retie_parameters(model, tied)
    if any(offload.values()):
        offloaded = sum(offload.values())
        logger.info("%d parts are offloaded; their weights are on the meta device between two calls.", offloaded)


def _attach_to_split(
    model: Module,
    main: tensors.Device,
    execution: tensors.DeviceMap,
    offload: Mapping[str, bool],
    terms: dict[str, Any],
) -> None:
    """Attach hooks for the tensors that a split module has beside its children: the map has devices for them alone."""
    modules = {name for name, _ in model.named_modules()}
    owners = {name.rpartition(".")[0] for name in offload if name not in modules}
    for owner in sorted(owners):
        if not owner or covering(owner, modules & offload.keys()) is not None:
            continue  # the hook of the whole model, or of a module around it, minds them
        names = [name for name in offload if name.rpartition(".")[0] == owner and name not in modules]
        if all(offload[name] for name in names):
            weights = PrefixedDataset[Tensor](terms["weights_map"], f"{owner}.")
            hook = offload_hooks.AlignDevicesHook(main, offload=True, **{**terms, "weights_map": weights})
            add_hook_to_module(model.get_submodule(owner), hook, append=True)
            continue
        for name in names:
            value = terms["weights_map"][name] if tensors.tensor_of(model, name).is_meta else None
            tensors.set_module_tensor_to_device(model, name, execution[name], value=value)


def _move_guarded(model: Module, name: str, *args: Any, **kwargs: Any) -> Any:
    if name != "to" or torch._C._nn._parse_to(*args, **kwargs)[0] is not None:
        warn_user(
            "You shouldn't move a model that is dispatched: its parts have devices of their own. Take its hooks off first, "
            "with remove_hook_from_submodules."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise StateError(
            "You can't move a model that has some modules offloaded to cpu or disk. Take its hooks off first, with "
            "remove_hook_from_submodules."
        )
    return getattr(type(model), name)(model, *args, **kwargs)
