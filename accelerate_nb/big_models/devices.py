"""The name of a device in a device map: a number, a torch name, `cpu`, `disk`, `meta`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from accelerate_nb.devices.xla import is_awake
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.xla import device as xla

Device = int | str | torch.device
DeviceMap = Mapping[str, Device]

DISK = "disk"


def as_device(device: Device) -> torch.device:
    """Torch's own device; a number is one of the accelerators of this machine."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, int):
        return _accelerator(device)
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(
            f"{device!r} was requested as a device, but torch knows no such device ({str(error).splitlines()[0]}). Use a "
            "number, 'cpu', 'disk' or a name of torch's."
        ) from None


def _accelerator(number: int) -> torch.device:
    if number == 0 and is_awake():
        return xla.device()
    device_type = accelerator()
    count = 0 if device_type is None else torch.accelerator.device_count()
    # torch itself gives a build for CUDA the device 0 also where there is no GPU
    if device_type is None or not 0 <= number < count:
        found = "no accelerator" if device_type is None else f"{count} of kind {device_type!r}"
        raise ConfigurationError(
            f"{number!r} was requested as a device, but this machine has {found}. Name an available device, such as 'cpu'."
        )
    return torch.device(device_type, number)


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
    """The XLA device of this rank, once it computes on one, else the first accelerator of this machine, or the CPU."""
    if is_awake():
        return xla.device()
    device_type = accelerator()
    return torch.device("cpu") if device_type is None else torch.device(device_type, 0)


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether both are one device; an accelerator without a number is the first of its kind."""
    return _numbered(first_device) == _numbered(second_device)


def _numbered(device: torch.device) -> torch.device:
    if device.type == "cpu" or device != torch.device(device.type):
        return device
    return torch.device(device.type, 0)
