"""Where a tensor's numbers lie: tensors of one address have one memory."""

from __future__ import annotations

import torch
from torch import Tensor

from accelerate_nb.runtime.checkpoints import xla


def is_apart(device: torch.device) -> bool:
    """Whether a device's memory has no addresses, and its tensors no storages that torch could share, copy or pickle."""
    return device.type == "xla"


def address(tensor: Tensor) -> int:
    """Where the tensor's first number lies; on a device without addresses, which of its tensors this is."""
    return xla.number(tensor) if is_apart(tensor.device) else tensor.data_ptr()


def storage(tensor: Tensor) -> int:
    """Where the memory begins that the tensor is a part of, or all of; on a device without addresses every tensor is all of its own."""
    return xla.number(tensor) if is_apart(tensor.device) else tensor.untyped_storage().data_ptr()
