"""What torch_xla says of the machine that it computes on."""

from __future__ import annotations


def device_type() -> str:
    """The kind of device that torch_xla computes on: "TPU", "CUDA", "CPU"."""
    import torch_xla.runtime

    return str(torch_xla.runtime.device_type())
