"""DeepSpeed's optimizers for states in host memory, whose C++ is compiled once, before it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def map_pytorch_optim_to_deepspeed(optimizer: Optimizer) -> Any:
    """DeepSpeed's optimizer for host memory in the place of one of torch's, or of bitsandbytes': Adagrad, Lion, or else Adam."""
    defaults = {name: value for name, value in optimizer.defaults.items() if name in {"lr", "weight_decay"}}
    kind, is_adamw = _kind(optimizer)
    # Accelerate passes it to all of them, though Adam alone takes it
    if kind == "adam":
        defaults["adamw_mode"] = is_adamw
    return _class(kind)(optimizer.param_groups, **defaults)


def _kind(optimizer: Optimizer) -> tuple[str, bool]:
    names = {found.__name__ for found in type(optimizer).__mro__ if found.__module__.startswith("bitsandbytes")}
    is_32_bits = getattr(optimizer, "optim_bits", getattr(getattr(optimizer, "args", None), "optim_bits", None)) == 32
    if isinstance(optimizer, torch.optim.Adagrad) or ({"Adagrad", "Adagrad32bit"} & names and is_32_bits):
        return "adagrad", False
    if {"Lion", "Lion32bit"} & names and is_32_bits:
        return "lion", False
    return "adam", isinstance(optimizer, torch.optim.AdamW) or bool({"AdamW", "AdamW32bit"} & names and is_32_bits)


def _class(kind: str) -> Any:
    if kind == "adagrad":
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        return DeepSpeedCPUAdagrad
    if kind == "lion":
        from deepspeed.ops.lion import DeepSpeedCPULion

        return DeepSpeedCPULion
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam
