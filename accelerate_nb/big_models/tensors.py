"""The tensors of a module by their names, and the devices that they can be on."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from accelerate_nb.devices.xla import is_awake
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints.host_copy import address, storage
from accelerate_nb.runtime.training.memory import clear_device_cache
from accelerate_nb.runtime.xla.device import device as device_of_rank

# What `accelerate.utils.modeling` offers.
__all__ = [
    "check_device_same", "get_non_persistent_buffers", "id_tensor_storage", "named_module_tensors",
    "set_module_tensor_to_device",
]  # fmt: skip

Device = int | str | torch.device
DeviceMap = Mapping[str, Device]

DISK = "disk"

# The copies of a tied weight: its address on its first device, then one tensor for each device.
TiedParameters = dict[int, dict[Device, Tensor]]


def as_device(device: Device) -> torch.device:
    """Torch's own device; a number is one of the accelerators of this machine."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, str):
        try:
            return torch.device(device)
        except RuntimeError as error:
            raise ConfigurationError(
                f"{device!r} was requested as a device, but torch knows no such device ({str(error).splitlines()[0]}). Use a "
                "number, 'cpu', 'disk' or a name of torch's."
            ) from None
    if device == 0 and is_awake():
        return device_of_rank()
    device_type = accelerator()
    count = 0 if device_type is None else torch.accelerator.device_count()
    # torch itself gives a build for CUDA the device 0 also where there is no GPU
    if device_type is None or not 0 <= device < count:
        found = "no accelerator" if device_type is None else f"{count} of kind {device_type!r}"
        raise ConfigurationError(
            f"{device!r} was requested as a device, but this machine has {found}. Name an available device, such as 'cpu'."
        )
    return torch.device(device_type, device)


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Torch's own data type, from itself or from its name: `"float16"`, `"torch.float16"`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(f"dtype={dtype!r} is none of torch's data types. Write one such as 'float16'.")
    return found


def accelerator() -> str | None:
    """The type of accelerator that torch finds: `cuda`, `xpu`, `mps`; `None` where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def best_device() -> torch.device:
    """The XLA device of this rank, once it computes on one, else the accelerator that is its current one, or the CPU."""
    if is_awake():
        return device_of_rank()
    return torch.device(accelerator() or "cpu")


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether both are one device; an accelerator without a number is the first of its kind."""
    if first_device.type != second_device.type or first_device.type == "cpu":
        return first_device == second_device  # "cpu" and "cpu:0" differ, as in Accelerate
    return (first_device.index or 0) == (second_device.index or 0)


# -------------------------------------------------------------------------------------------------------------- names


def named_module_tensors(
    module: Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The parameters and, with `include_buffers`, the buffers of a module by name; with `recurse` those of its children too."""
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def all_names(module: Module, *, buffers: bool, recurse: bool, persistent_only: bool = False) -> list[str]:
    """The names of a module's tensors; a tensor with two names is there twice."""
    names = [name for name, _ in module.named_parameters(recurse=recurse, remove_duplicate=False)]
    if not buffers:
        return names
    left_out = get_non_persistent_buffers(module, recurse, fqns=True) if persistent_only else set()
    buffer_names = [name for name, _ in module.named_buffers(recurse=recurse, remove_duplicate=False)]
    return names + [name for name in buffer_names if name not in left_out]


def get_non_persistent_buffers(module: Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """The names of the buffers that a state dict leaves out; those of children with their path if `fqns`."""
    modules = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    return {
        f"{path}.{name}" if path and fqns else name
        for path, child in modules
        for name in child._non_persistent_buffers_set
    }


def owner_of(module: Module, name: str) -> tuple[Module, str]:
    """The submodule that holds the tensor of this dotted name, and the tensor's own name there."""
    path, _, leaf = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError as error:
        raise ConfigurationError(
            f"{type(module).__name__} has no tensor named {name!r}: {error}. "
            "Look the name up with `model.named_parameters()` or `model.named_buffers()`."
        ) from None
    if leaf not in owner._parameters and leaf not in owner._buffers:
        known = [*owner._parameters, *owner._buffers]
        raise ConfigurationError(
            f"{type(owner).__name__} does not have a parameter or a buffer named {leaf!r}. It has {known or 'none'}."
        )
    return owner, leaf


def tensor_of(module: Module, name: str) -> Tensor:
    """The parameter or buffer of this dotted name."""
    owner, leaf = owner_of(module, name)
    tensor: Tensor = getattr(owner, leaf)
    return tensor


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Device, address and number of bytes of the memory under a tensor; equal for tensors that share memory, and on `meta`."""
    return tensor.device, storage(tensor), tensor.untyped_storage().nbytes()


# ------------------------------------------------------------------------------------------------------------- moving


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
    tied = tied_params_map or {}
    addresses = [address(tensor) for tensor in (value, old) if tensor is not None] if tied else []
    shared_copies = next((tied[item] for item in addresses if item in tied), None)
    if shared_copies is not None and target in shared_copies:
        kept[name] = shared_copies[target]
        return
    with torch.no_grad():
        new = _moved(old, target, value, None if dtype is None else as_dtype(dtype), non_blocking)
        if new is not old and name in owner._buffers:
            kept[name] = new
        elif new is not old:
            # torch lets tensors of other classes pass for parameters; those are made by `Parameter` itself
            parameter_class: Any = type(old) if Parameter in type(old).__mro__ else Parameter
            kept[name] = parameter = parameter_class(new, requires_grad=old.requires_grad)
            # the marks that others left on the old one
            parameter.__dict__.update(old.__dict__)
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
