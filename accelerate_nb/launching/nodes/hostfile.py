"""Lists of hosts: as an argument, and as files that MPI and DeepSpeed read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.launching.nodes.node_sizes import Host

# `slots=4` of Open MPI and DeepSpeed, which also allows spaces, and `host:4` of MPICH and Intel MPI.
_SLOTS = re.compile(r"\bslots\s*=\s*(\d+)")


def hosts_of(entries: Iterable[str]) -> tuple[Host, ...]:
    """
    The hosts of entries such as `a`, `b:4`, `me@c:2`, `[::1]:4`; a host that is named twice has the slots of both.

    >>> hosts_of(["a", "b:4"])
    (Host(name='a', slots=None), Host(name='b', slots=4))
    """
    found: dict[str, Host] = {}
    for entry in entries:
        name, slots = _split(entry)
        before = found.get(name)
        if before is not None:
            slots = (before.slots or 1) + (slots or 1)
        found[name] = Host(name, slots)
    return tuple(found.values())


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """
    The hosts of a file, one a line with its slots: `a slots=4`, `b:4`, or the name alone; `#` begins a comment.

    Raises `ConfigurationError` where it can't be read, or names none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"hostfile={str(path)!r} was requested, and it can't be read: {error}. Name a file of one host a line."
        ) from None
    entries = [entry for line in lines if (entry := _entry(line.partition("#")[0]))]
    if not entries:
        raise ConfigurationError(
            f"hostfile={str(path)!r} was requested, and it names no host. Write one a line: a slots=4."
        )
    return hosts_of(entries)


def _entry(line: str) -> str:
    words = line.split()
    if not words:
        return ""
    slots = _SLOTS.search(line)
    return words[0] if slots is None else f"{words[0]}:{slots[1]}"


def _split(entry: str) -> tuple[str, int | None]:
    name, colon, slots = entry.strip().rpartition(":")
    # an address of IPv6 has more colons, and stands in brackets where slots follow it
    if colon and slots.isdecimal() and int(slots) and (":" not in name or name.endswith("]")):
        return name.replace("[", "").replace("]", ""), int(slots)
    return entry.strip().strip("[]"), None
