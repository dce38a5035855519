"""Which modules come from installed packages: they stay as they are while a notebook runs, the person's own files don't."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import PurePath

_INSTALLED = frozenset({"site-packages", "dist-packages"})


def is_installed(name: str) -> bool:
    """Whether a module that is loaded here came with an installed package."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and not _INSTALLED.isdisjoint(PurePath(file).parts)


def loaded_since(before: Iterable[str]) -> tuple[str, ...]:
    """The installed modules that were loaded since these were all there was, in the order of their loading."""
    known = frozenset(before)
    return tuple(name for name in list(sys.modules) if name not in known and is_installed(name))
