"""The move of one tensor of a module to a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from accelerate_nb.big_models.devices import Device, as_device, as_dtype
from accelerate_nb.big_models.tensors import owner_of
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints.host_copy import address
from accelerate_nb.runtime.training.memory import clear_device_cache

# The copies of a tied weight: its address on its first device, then one tensor for each device.
TiedParameters = dict[int, dict[Device, Tensor]]


def set_module_tensor_to_device(
    module: Module,
    tensor_name: str,
    device: Device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedParameters | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """
    Put a parameter or buffer on a device, with the numbers of `value` where that is given.

    `value` must have the tensor's shape; it is converted to `dtype`, or to the tensor's own dtype. A tensor on the `meta`
    device has no numbers, so it needs a `value` to leave it. Tied weights that `tied_params_map` knows are put there once.
    """
    owner, name = owner_of(module, tensor_name)
    old = getattr(owner, name)
    target = as_device(device)
    _check(tensor_name, old, target, value)
    kept: dict[str, Tensor | None] = owner._buffers if name in owner._buffers else owner._parameters  # type: ignore[assignment]
    shared_copies = _shared_copies(tied_params_map, value, old)
    if shared_copies is not None and target in shared_copies:
        kept[name] = shared_copies[target]
        return
    with torch.no_grad():
        new = _moved(old, target, value, None if dtype is None else as_dtype(dtype), non_blocking)
        if new is not old:
            kept[name] = new if name in owner._buffers else _parameter_like(old, new)
    if fp16_statistics is not None:
        kept[name].SCB = fp16_statistics.to(target)  # type: ignore[union-attr]  # the scales of an 8-bit weight
    if clear_cache and target.type not in ("cpu", "meta"):
        clear_device_cache()
    if shared_copies is not None:
        shared_copies[target] = getattr(owner, name)


def _check(name: str, old: Tensor | None, target: torch.device, value: Tensor | None) -> None:
    if old is None:
        raise ConfigurationError(f"{name} is None in this module, so nothing can be put on {target}. Leave it out.")
    if value is None:
        if old.is_meta and target.type != "meta":
            raise ConfigurationError(
                f"{name} is on the meta device, which holds no numbers; putting it on {target} needs a `value`."
            )
    elif old.shape != value.shape and type(old).__name__ != "Params4bit":  # bitsandbytes packs two weights in a byte
        raise ConfigurationError(
            f"{name} has the shape {tuple(old.shape)}, and a value of shape {tuple(value.shape)} was given for it. "
            "The weights are those of another model, or of another configuration."
        )


def _shared_copies(tied: TiedParameters | None, value: Tensor | None, old: Tensor) -> dict[Device, Tensor] | None:
    if not tied:
        return None
    candidates = [old] if value is None else [value, old]
    return next((tied[address(candidate)] for candidate in candidates if address(candidate) in tied), None)


def _moved(
    old: Tensor, target: torch.device, value: Tensor | None, dtype: torch.dtype | None, non_blocking: bool
) -> Tensor:
    if value is None:
        # without a value the numbers stay what they are; on `meta` there are none, and a type can be announced
        as_type = dtype if target.type == "meta" and dtype is not None and _is_real(old) else old.dtype
        return old.to(device=target, dtype=as_type, non_blocking=non_blocking)
    as_type = old.dtype if dtype is None else dtype if _is_real(value) else value.dtype
    return value.to(device=target, dtype=as_type, non_blocking=non_blocking)


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _parameter_like(old: Tensor, new: Tensor) -> Parameter:
    """A parameter of the old one's class that holds the new tensor, and the marks that others left on the old one."""
    # torch lets tensors of other classes pass for parameters; those are made by `Parameter` itself
    parameter_class: Any = type(old) if Parameter in type(old).__mro__ else Parameter
    parameter: Parameter = parameter_class(new, requires_grad=old.requires_grad)
    parameter.__dict__.update(old.__dict__)
    return parameter
