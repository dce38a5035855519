"""Small operations on plain values: numbers, names, dictionaries."""

import logging
import platform
import re
import socket
from functools import reduce
from typing import Any

from packaging.version import Version

# What `accelerate.utils.other` offers.
__all__ = [
    "check_os_kernel", "convert_bytes", "get_free_port", "get_pretty_name", "is_port_in_use", "merge_dicts",
    "recursive_getattr",
]  # fmt: skip

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


def is_port_in_use(port: int | None = None) -> bool:
    """Whether someone listens at a port of this machine; 29500, the default of torch's rendezvous, where none is named."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as caller:
        return caller.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """A port that was free a moment ago; who can bind port 0 directly is safer."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


_HANGS_BELOW = "5.5.0"

_log = logging.getLogger("accelerate_nb.utils.other")


def check_os_kernel() -> None:
    """Warn, on Linux, of a kernel older than 5.5, on which training may hang."""
    found = re.search(r"\d+\.\d+\.\d+", platform.release())
    if platform.system() != "Linux" or found is None or Version(found[0]) >= Version(_HANGS_BELOW):
        return
    _log.warning(
        f"Linux {found[0]} runs here, and below {_HANGS_BELOW} a process can hang. Upgrade the kernel to that version or a "
        "newer one."
    )
