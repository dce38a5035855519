"""Weights kept in a small type, and computed with in a larger one."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.nn import Module

from accelerate_nb.big_models.hooks.base import ModelHook, add_hook_to_module, not_compiled
from accelerate_nb.runtime.compat.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING


class LayerwiseCastingHook(ModelHook):
    """Keeps a module's weights in `storage_dtype`, and casts them to `compute_dtype` while its forward runs."""

    _is_stateful = False  # diffusers reads it

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: Module) -> Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @not_compiled
    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @not_compiled
    def post_forward(self, module: Module, output: Any) -> Any:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """
    Keep the weights of all linear and convolution layers in `storage_dtype`; each is cast while it computes.

    Modules whose name matches one of the patterns (regular expressions), or that are of one of the classes, are left as they
    are, with all that is in them.

    >>> attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern="norm")
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
    _attach(module, "", hook, tuple(re.compile(pattern) for pattern in patterns), skip_modules_classes or ())


def _attach(
    module: Module,
    name: str,
    hook: LayerwiseCastingHook,
    patterns: tuple[re.Pattern[str], ...],
    classes: tuple[type[Module], ...],
) -> None:
    if isinstance(module, classes) or any(pattern.search(name) for pattern in patterns):
        return
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        add_hook_to_module(module, hook, append=True)
        return
    for child_name, child in module.named_children():
        _attach(child, f"{name}.{child_name}" if name else child_name, hook, patterns, classes)
