"""Objects that stay in their process: pickled there, one loads as itself."""

from __future__ import annotations

import os
from multiprocessing.context import get_spawning_popen
from typing import Any, NoReturn
from uuid import uuid4
from weakref import WeakValueDictionary

from accelerate_nb.errors import StateError
from accelerate_nb.rank_local import RankLocal

# It holds nothing alive.
_objects: RankLocal[WeakValueDictionary[str, Any]] = RankLocal(WeakValueDictionary)


def stays(item: object) -> tuple[Any, ...]:
    """
    The return value of `__reduce__` for an object of this process, which loads as that object, and in other processes not at all.

    Raises `StateError` at once while something is pickled for another process: the arguments of a launched function, of a
    `multiprocessing.Process`, of a loader's workers.
    """
    if get_spawning_popen() is not None:
        _refuse(type(item).__name__)
    name = uuid4().hex
    _objects.get()[name] = item
    return _itself, (type(item).__name__, os.getpid(), name)


def _itself(class_name: str, pid: int, name: str) -> Any:
    item = _objects.get().get(name) if pid == os.getpid() else None
    return _refuse(class_name) if item is None else item


def _refuse(class_name: str) -> NoReturn:
    raise StateError(
        f"An {class_name} can't travel: it belongs to the process in which it was made, for as long as it is in use there. "
        "Make it inside the function that is launched."
    )
