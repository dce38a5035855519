"""What stays in its process: pickled, it comes back as itself."""

from __future__ import annotations

import os
from multiprocessing.context import get_spawning_popen
from typing import Any, NoReturn
from uuid import uuid4
from weakref import WeakValueDictionary

from accelerate_nb.errors import StateError
from accelerate_nb.own import Own

# It holds nothing alive.
_here: Own[WeakValueDictionary[str, Any]] = Own(WeakValueDictionary)


def stays(one: object) -> tuple[Any, ...]:
    """
    What `__reduce__` returns for an object of this process, which loads as that object, and in other processes not at all.

    Raises `StateError` at once while something is pickled for another process: the arguments of a launched function, of a
    `multiprocessing.Process`, of a loader's workers.
    """
    if get_spawning_popen() is not None:
        _refuse(type(one).__name__)
    name = uuid4().hex
    _here.get()[name] = one
    return _itself, (type(one).__name__, os.getpid(), name)


def _itself(kind: str, pid: int, name: str) -> Any:
    one = _here.get().get(name) if pid == os.getpid() else None
    return _refuse(kind) if one is None else one


def _refuse(kind: str) -> NoReturn:
    raise StateError(
        f"An {kind} can't travel: it belongs to the process in which it was made, for as long as it is in use there. "
        "Make it inside the function that is launched."
    )
