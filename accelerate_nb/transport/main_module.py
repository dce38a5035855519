"""The `__main__` of a worker: the notebook's own functions and classes, by the names under which pickle looks for them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from accelerate_nb.rank_local import RankLocal

_NAME = "__main__"
_main_module = RankLocal(lambda: ModuleType(_NAME))


class _RankMainModule(ModuleType):
    """The `__main__` of a process whose ranks are threads: each rank reads and writes its own names."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        # what every module has from the start would hide the rank's own
        for name in ("__doc__", "__loader__", "__package__", "__spec__"):
            ModuleType.__delattr__(self, name)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # an attribute there
        return vars(_main_module.get())

    def __getattr__(self, name: str) -> Any:
        return getattr(_main_module.get(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_main_module.get(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_main_module.get(), name)

    def __dir__(self) -> list[str]:
        return dir(_main_module.get())


def is_of_main(value: Any) -> bool:
    """Whether a value is a function or a class that this process's `__main__` has under its own name."""
    if not isinstance(value, (type, FunctionType)) or value.__module__ != _NAME:
        return False
    return vars(sys.modules[_NAME]).get(value.__qualname__) is value


def become_main(module: ModuleType) -> None:
    """
    Make a module this process's `__main__`; that of this rank alone, where it is a thread among others.

    pickle and multiprocessing look there for what was defined there.
    """
    if threading.current_thread() is threading.main_thread():
        sys.modules[_NAME] = module
        return
    _main_module.set(module)
    if not isinstance(sys.modules[_NAME], _RankMainModule):
        sys.modules[_NAME] = _RankMainModule()


def install_main(names: Mapping[str, Any]) -> None:
    """
    Make a module with these names the `__main__`.

    What ranks send each other with the plain pickle (`all_gather_object`, a queue, `torch.save` of an object) refers to
    the notebook's classes as `__main__.Name`.
    """
    module = ModuleType(_NAME)
    vars(module).update(names)
    become_main(module)
