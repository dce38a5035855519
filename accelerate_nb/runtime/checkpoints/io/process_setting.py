"""A setting of the whole process that is held while some thread needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class SharedSetting:
    """
    Blocks of several threads that need the same setting: the first that begins sets it, and the last that ends takes it back.

    Ranks may be threads, and what each of them took back by itself would be taken from the others.
    """

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        self._setting = setting
        self._lock = threading.Lock()
        self._blocks = 0
        self._set: AbstractContextManager[Any] | None = None

    @contextmanager
    def block(self) -> Iterator[None]:
        """A block in which it is set."""
        with self._lock:
            if self._set is None:
                self._set = self._setting()
                self._set.__enter__()
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    held, self._set = self._set, None
                    held.__exit__(None, None, None)
