"""The address of a tensor's numbers: tensors of one address have one memory."""

from __future__ import annotations

import torch
from torch import Tensor

from accelerate_nb.runtime.xla import device as xla


def is_apart(device: torch.device) -> bool:
    """Whether a device's memory has no addresses, and its tensors no storages that torch could share, copy or pickle."""
    return device.type == "xla"


def address(tensor: Tensor) -> int:
    """The address of the tensor's first number; on a device without addresses, the tensor's number."""
    return xla.number_of(tensor) if is_apart(tensor.device) else tensor.data_ptr()


def storage(tensor: Tensor) -> int:
    """The address of the memory that the tensor is a part of; on a device without addresses each has its own."""
    return xla.number_of(tensor) if is_apart(tensor.device) else tensor.untyped_storage().data_ptr()
