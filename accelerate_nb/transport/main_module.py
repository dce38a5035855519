"""The `__main__` of a worker: the notebook's own functions and classes, by the names under which pickle looks for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

_NAME = "__main__"


def is_of_main(value: Any) -> bool:
    """Whether a value is a function or a class that this process's `__main__` has under its own name."""
    if not isinstance(value, (type, FunctionType)) or value.__module__ != _NAME:
        return False
    return vars(sys.modules[_NAME]).get(value.__qualname__) is value


def become_main(module: ModuleType) -> None:
    """Make a module this process's `__main__`: pickle and multiprocessing look there for what was defined there."""
    sys.modules[_NAME] = module


def install_main(names: Mapping[str, Any]) -> None:
    """
    Make a module with these names the `__main__`.

    What ranks send each other with the plain pickle (`all_gather_object`, a queue, `torch.save` of an object) refers to
    the notebook's classes as `__main__.Name`.
    """
    module = ModuleType(_NAME)
    vars(module).update(names)
    become_main(module)
