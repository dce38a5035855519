"""How a model comes out of what was put around it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from accelerate_nb.runtime.precision.base import restore_forward


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """
    The model inside of `DistributedDataParallel` or `DataParallel`.

    A compiled model is compiled still, unless `keep_torch_compile=False`; its mixed-precision forward is taken off where
    `keep_fp32_wrapper=False`; with `recursive` its children are taken out of what is around them, too.
    """
    compiled = model if isinstance(getattr(model, "_orig_mod", None), Module) else None
    inner = _inside(model if compiled is None else compiled._orig_mod)
    if recursive:
        inner = _inside_all(inner)
    if not keep_fp32_wrapper:
        restore_forward(inner)
    if compiled is None or not keep_torch_compile:
        return inner
    compiled._orig_mod = inner
    return compiled


def _inside(model: Any) -> Any:
    while isinstance(model, (DistributedDataParallel, torch.nn.DataParallel)):
        model = model.module
    return model


def _inside_all(module: Module) -> Module:
    while isinstance(getattr(module, "module", None), Module):
        module = module.module  # type: ignore[assignment]  # just checked
    for name, child in module.named_children():
        setattr(module, name, _inside_all(child))
    return module
