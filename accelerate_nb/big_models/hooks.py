"""Hooks around a module's forward, and those that compute in another type than weights are kept in."""

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule
from torch.nn import Module

from accelerate_nb.big_models.device_map import retie_parameters
from accelerate_nb.runtime.compat.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING

# What `accelerate.hooks` offers.
__all__ = [
    "LayerwiseCastingHook", "ModelHook", "SequentialHook", "add_hook_to_module", "remove_hook_from_module",
    "remove_hook_from_submodules",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])

# A dispatched model's replacements of Module's own methods, until its hooks are removed.
GUARDED = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
TIES = "_tied_before_hooks"


def not_compiled(function: Function) -> Function:
    """The function, left out of what torch.compile traces; torch's compiler is not imported for it."""
    compiled_around: list[Any] = []

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # nothing is traced before the compiler is imported, which takes seconds
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not compiled_around:
            compiled_around.append(torch.compiler.disable(function))
        return compiled_around[0](*args, **kwargs)

    return run  # type: ignore[return-value]  # the same function with the same arguments


class ModelHook:
    """
    Runs just before and just after a module's forward; unlike torch's hooks it sees and may change the keywords.

    With `no_grad` the forward runs without gradients.
    """

    no_grad = False

    def init_hook(self, module: Module) -> Module:
        """The module as it is from now on; called when the hook is attached."""
        return module

    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with which forward is called."""
        return args, kwargs

    def post_forward(self, module: Module, output: Any) -> Any:
        """The output of forward as the caller gets it."""
        return output

    def detach_hook(self, module: Module) -> Module:
        """The module as it was; called when the hook is taken off."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one; each gets what the one before it returned."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: Module) -> Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    @not_compiled
    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    @not_compiled
    def post_forward(self, module: Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: Module) -> Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: Module, hook: ModelHook, append: bool = False) -> Module:
    """
    Attach a hook to a module, which is changed and returned.

    It replaces the hook that is there already, or with `append` runs after it.

    >>> layer = add_hook_to_module(torch.nn.Linear(2, 2), ModelHook())
    """
    current = getattr(module, "_hf_hook", None)
    if append and current is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(current, hook)
    if not hasattr(module, "_old_forward"):
        module._old_forward = module.forward  # type: ignore[assignment]  # a method, which Module's types don't foresee
    original: Any = module._old_forward
    module = hook.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment]  # the same
    # a partial, not a closure: a deep copy of the model calls the copy, and a hooked model can be pickled
    forward = functools.update_wrapper(functools.partial(_hooked_forward, module), original)
    if isinstance(module, GraphModule):
        # each graph has a class of its own, whose forward is rewritten when the graph is recompiled
        type(module).forward = staticmethod(forward)
    else:
        module.forward = forward
    return module


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = module._hf_hook.pre_forward(module, *args, **kwargs)
    if module._hf_hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return module._hf_hook.post_forward(module, output)


def remove_hook_from_module(module: Module, recurse: bool = False) -> Module:
    """Take a module's hook off, with `recurse` those of its children too; its forward is its own again."""
    hooked: Any = module
    if hasattr(hooked, "_hf_hook"):
        hooked._hf_hook.detach_hook(hooked)
        del hooked._hf_hook
    if hasattr(hooked, "_old_forward"):
        original: Any = hooked._old_forward
        function = getattr(original, "__func__", None)
        if isinstance(hooked, GraphModule):
            type(hooked).forward = function or staticmethod(original)
        elif function is type(hooked).forward:
            hooked.__dict__.pop("forward", None)
        else:
            hooked.forward = original
        del hooked._old_forward
    for name in GUARDED:
        hooked.__dict__.pop(name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
        # weights that were tied before the model was dispatched are one again
        retie_parameters(module, module.__dict__.pop(TIES, []))
    return module


def remove_hook_from_submodules(module: Module) -> None:
    """Take the hooks of a module and of all modules inside of it off."""
    remove_hook_from_module(module, recurse=True)


@dataclass(eq=False)
class LayerwiseCastingHook(ModelHook):
    """Keeps a module's weights in `storage_dtype`, and casts them to `compute_dtype` while its forward runs."""

    _is_stateful = False  # diffusers reads it

    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    non_blocking: bool

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

    def attach(module: Module, name: str) -> None:
        if isinstance(module, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            add_hook_to_module(module, hook, append=True)
            return
        for child_name, child in module.named_children():
            attach(child, f"{name}.{child_name}" if name else child_name)

    attach(module, "")
