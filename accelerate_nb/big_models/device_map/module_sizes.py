"""The sizes of a model's parts in bytes."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.big_models.devices import as_dtype
from accelerate_nb.big_models.tensors import named_module_tensors
from accelerate_nb.errors import ConfigurationError

# A part of a model: a module, or a parameter or buffer that stands beside modules.
Part = tuple[str, Module | Tensor]

# Types that torch doesn't have, as `CustomDtype` names them; in bytes.
_CUSTOM = {"fp8": 1.0, "int4": 0.5, "int2": 0.25}


def dtype_byte_size(dtype: Any) -> int | float:
    """
    The bytes of one number of this type; a fraction for types that pack several in a byte.

    >>> dtype_byte_size(torch.float32)
    4
    """
    if dtype == torch.bool:
        return 1 / 8  # Accelerate's figure, which its device maps are made with
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    if isinstance(dtype, enum.Enum) and dtype.value in _CUSTOM:
        size = _CUSTOM[dtype.value]
        return int(size) if size == int(size) else size
    raise ConfigurationError(f"`dtype` is not a valid dtype: {dtype}. Use one of torch's, or a CustomDtype.")


def compute_module_sizes(
    model: Module, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None, buffers_only: bool = False
) -> dict[str, int]:
    """
    The bytes of every module, parameter and buffer by name, as if floating-point weights were converted to `dtype`.

    The whole model is under the empty name; a weight with two names counts once, under the first.
    """
    wanted = None if dtype is None else dtype_byte_size(_typed(dtype))
    special = {name: dtype_byte_size(_typed(special_dtype)) for name, special_dtype in (special_dtypes or {}).items()}
    sizes: dict[str, Any] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        size = tensor.numel() * special.get(name, _bytes_per_number(tensor, wanted))
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += size
    return sizes


def _typed(dtype: Any) -> Any:
    return as_dtype(dtype) if isinstance(dtype, str) and not isinstance(dtype, enum.Enum) else dtype


def _bytes_per_number(tensor: Tensor, wanted: float | None) -> int | float:
    size = dtype_byte_size(tensor.dtype)
    converted = tensor.is_floating_point() or tensor.is_complex()
    return size if wanted is None or not converted else min(wanted, size)


def compute_module_total_buffer_size(
    model: Module, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None
) -> int:
    """The bytes of all buffers of a model."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def parts_of(model: Module) -> list[Part]:
    """The direct parts of a model: its own parameters, its children, its own buffers."""
    return [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]


def children_of(name: str, part: Module | Tensor, no_split: Collection[str]) -> list[Part]:
    """The parts that a part can be split into; none where it has no children, or is of a class that stays whole."""
    if isinstance(part, Tensor) or type(part).__name__ in no_split:
        return []
    children = list(part.named_children())
    inner: list[Part] = [*part.named_parameters(recurse=False), *children] if children else []
    return [(f"{name}.{child}", item) for child, item in inner]


def get_max_layer_size(
    modules: Sequence[Part], module_sizes: Mapping[str, int], no_split_module_classes: Collection[str]
) -> tuple[int, list[str]]:
    """
    The bytes of the largest layer among these parts, and the names of the layers that are so large.

    A layer is a module without children, or one of a class that must not be split.
    """
    largest, names = 0, list[str]()
    waiting = list(reversed(modules))
    while waiting:
        name, part = waiting.pop()
        children = list(part.named_children()) if isinstance(part, Module) else []
        if children and type(part).__name__ not in no_split_module_classes:
            waiting.extend((f"{name}.{child}", item) for child, item in reversed(children))
            continue
        size = module_sizes[name]
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: Module) -> tuple[int, tuple[int, list[str]]]:
    """The bytes of the model, and those of its largest layer with the names of the layers that are so large."""
    sizes = compute_module_sizes(model)
    # transformers' models say which of their classes stay whole
    no_split: Any = getattr(model, "_no_split_modules", None) or []
    return sizes[""], get_max_layer_size(parts_of(model), sizes, no_split)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """The names that are no prefix of another name, the empty one left out."""
    parents = {name.rpartition(".")[0] for name in module_sizes if "." in name}
    return [name for name in module_sizes if name and name not in parents]


def as_classes(no_split_module_classes: str | Collection[str] | None) -> list[str]:
    """The names of classes as a list, however they were given."""
    if no_split_module_classes is None:
        return []
    return [no_split_module_classes] if isinstance(no_split_module_classes, str) else list(no_split_module_classes)
