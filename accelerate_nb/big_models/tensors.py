"""The tensors of a module by their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints.host_copy import storage
from accelerate_nb.runtime.training.unwrap import extract_model_from_parallel


def named_module_tensors(
    module: Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The parameters and, with `include_buffers`, the buffers of a module by name; with `recurse` those of its children too."""
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = _non_persistent(module, recurse) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def all_names(module: Module, *, buffers: bool, recurse: bool, persistent_only: bool = False) -> list[str]:
    """The names of a module's tensors; a tensor with two names is there twice."""
    names = [name for name, _ in module.named_parameters(recurse=recurse, remove_duplicate=False)]
    if not buffers:
        return names
    left_out = _non_persistent(module, recurse) if persistent_only else set()
    buffer_names = [name for name, _ in module.named_buffers(recurse=recurse, remove_duplicate=False)]
    return names + [name for name in buffer_names if name not in left_out]


def get_non_persistent_buffers(module: Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """The names of the buffers that a state dict leaves out; those of children with their path if `fqns`."""
    full = _non_persistent(module, recurse)
    return full if fqns else {name.rpartition(".")[2] for name in full}


def _non_persistent(module: Module, recurse: bool) -> set[str]:
    if not recurse:
        return set(module._non_persistent_buffers_set)
    return {
        f"{path}.{name}" if path else name
        for path, child in module.named_modules(remove_duplicate=False)
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


def is_peft_model(model: Any) -> bool:
    """Whether the model, or the one inside of its parallel wrapper, is PEFT's."""
    bases = type(extract_model_from_parallel(model)).__mro__
    return any(base.__name__ == "PeftModel" and base.__module__.startswith("peft.") for base in bases)
