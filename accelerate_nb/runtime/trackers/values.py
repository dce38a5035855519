"""Logged values as plain Python: tensors and numpy's numbers become numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor


def plain(value: Any) -> Any:
    """
    The value, a number where it is a tensor, array or numpy number of one element, on any device.

    Mappings are searched to any depth; everything else comes back as it is. A tensor that has no values (on the meta device)
    stays one.
    """
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else value
    if isinstance(value, (np.generic, np.ndarray)):
        return value.item() if value.size == 1 else value
    return value


def flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """
    Names with values that are no mappings: `{"loss": {"train": 1}}` gives `"loss/train", 1`.

    >>> list(flat({"a": {"b": 1, "c": 2}, "d": 3}))
    [('a/b', 1), ('a/c', 2), ('d', 3)]
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def settings(values: Any) -> Any:
    """
    A configuration made of nothing but numbers, strings, booleans, `None`, lists and dictionaries with strings as keys.

    Anything else becomes its `str`.
    """
    values = plain(values)
    if values is None or type(values) in {bool, int, float, str}:
        return values
    if isinstance(values, (int, float, str)):
        # YAML would write an enum that is also a string as a Python object
        return next(
            plain_type(getattr(values, "value", values))
            for plain_type in (int, float, str)
            if isinstance(values, plain_type)
        )
    if isinstance(values, Mapping):
        return {str(name): settings(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [settings(value) for value in values]
    return str(values)
