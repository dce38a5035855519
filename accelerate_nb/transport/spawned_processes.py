"""Processes that multiprocessing starts by spawn or forkserver: they find what this process's `__main__` defines."""

import sys
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from accelerate_nb.sources.cells import current_sources
from accelerate_nb.transport.serializer import dump, explain, load

_NAME = "__main__"


def send_main_by_value() -> None:
    """From now on, send `__main__`'s functions and classes, and lambdas, by value to processes that multiprocessing starts anew."""
    # A notebook's `__main__` is no file that they could import; where it is one, its names go as always. Forked ones are left alone.
    if not isinstance(getattr(reduction.dump, "__self__", None), _MainByValue):
        reduction.dump = _MainByValue().dump


class _MainByValue:
    """Pickles what multiprocessing sends to processes that it starts."""

    def __init__(self) -> None:
        # for messages to processes that are there: a pool sends its function with each task
        self._pickled: WeakKeyDictionary[Any, list[bytes]] = WeakKeyDictionary()

    def dump(self, obj: Any, file: Any, protocol: int | None = None) -> None:
        """Pickle a process that starts; from now on, messages to it go through the same pickler."""
        setattr(ForkingPickler, "reducer_override", lambda _pickler, part: self._reduced(part))  # noqa: B010 - it has none by itself
        ForkingPickler(file, protocol).dump(obj)

    def _reduced(self, obj: Any) -> Any:
        if not isinstance(obj, (FunctionType, type)):
            return NotImplemented
        if "<" in obj.__qualname__:
            # <lambda> or <locals>
            entries = self._by_value(obj)
            return NotImplemented if entries is None else (_loaded, (entries,))
        if obj.__module__ != _NAME or _is_importable():
            return NotImplemented
        outermost = getattr(sys.modules[_NAME], obj.__qualname__.partition(".")[0], obj)
        entries = self._by_value(outermost)
        return NotImplemented if entries is None else (_of_main, (obj.__qualname__, entries))

    def _by_value(self, obj: Any) -> list[bytes] | None:
        """A function or a class, and those of `__main__` that it uses; `None` where only another way of pickling may work."""
        is_start = get_spawning_popen() is not None
        if not is_start and obj in self._pickled:
            return self._pickled[obj]
        names: dict[str, Any] = {}
        try:
            entries = [bytes(entry) for entry in dump((obj, names), names, main_by_name=_is_importable())]
        except Exception as error:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
            if not is_start:
                return None
            raise explain({obj.__name__: obj}, error, current_sources()) from None
        if not is_start:
            self._pickled[obj] = entries
        return entries


def _is_importable() -> bool:
    """Whether a process that starts anew imports the file or the module that `__main__` is, as multiprocessing has it do."""
    main = sys.modules[_NAME]
    return getattr(main, "__file__", None) is not None or getattr(main, "__spec__", None) is not None


def _of_main(path: str, entries: list[bytes]) -> Any:
    """What `__main__` has under a name, which it gets where it has none."""
    main = sys.modules[_NAME]
    first = path.partition(".")[0]
    if first not in vars(main):
        vars(main).setdefault(first, _loaded(entries))
    found: Any = attrgetter(path)(main)
    return found


def _loaded(entries: list[bytes]) -> Any:
    """A function or a class; `__main__` gets those that it uses, for what is sent back by their names."""
    found, names = load(entries)
    for name, value in names.items():
        vars(sys.modules[_NAME]).setdefault(name, value)
    return found
