"""The modules of installed packages: they stay as they are while a notebook runs, the person's own files don't."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import PurePath

_INSTALLED = frozenset({"site-packages", "dist-packages"})


def is_installed(name: str) -> bool:
    """Whether a loaded module came with an installed package."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and not _INSTALLED.isdisjoint(PurePath(file).parts)


def loaded_since(count: int) -> tuple[str, ...]:
    """The installed modules that were loaded since there were `count` modules, in the order of their loading."""
    # from the end, where the new ones are: in a forked process, to read a name is to copy its page of memory
    new_names = list(islice(reversed(sys.modules), max(0, len(sys.modules) - count)))
    return tuple(name for name in reversed(new_names) if is_installed(name))
