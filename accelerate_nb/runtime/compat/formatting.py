"""Small operations on plain values: numbers, names, dictionaries."""

from __future__ import annotations

from functools import reduce
from typing import Any

_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def convert_bytes(size: float) -> str:
    """
    A number of bytes in the largest unit of which there is at least one, each 1024 of the one before.

    >>> convert_bytes(1536)
    '1.5 KB'
    """
    for unit in _UNITS:
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """
    `destination` itself, with everything that `source` holds written into it; dictionaries in both are merged likewise.

    >>> merge_dicts({"a": {"x": 1}}, {"a": {"y": 2}})
    {'a': {'y': 2, 'x': 1}}
    """
    for key, value in source.items():
        destination[key] = merge_dicts(value, destination.setdefault(key, {})) if isinstance(value, dict) else value
    return destination


def get_pretty_name(obj: Any) -> str:
    """The name of a class or a function; for any other object that of its class."""
    for named in (obj, type(obj)):
        for attribute in ("__qualname__", "__name__"):
            if hasattr(named, attribute):
                return str(getattr(named, attribute))
    raise AssertionError("every class has a name")


def recursive_getattr(obj: Any, attr: str) -> Any:
    """
    The attribute at the end of a dotted path.

    >>> recursive_getattr(3 + 4j, "real.imag")
    0.0
    """
    return reduce(getattr, attr.split("."), obj)
