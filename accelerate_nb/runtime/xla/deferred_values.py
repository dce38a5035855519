"""The queue of prints and logs whose values a device has still to compute: in order, without making it wait."""

from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelerate_nb.rank import background_tasks
from accelerate_nb.runtime.operations.nested import leaves_of, mapped
from accelerate_nb.runtime.xla import device as xla
from accelerate_nb.user_warnings import warn_user


@dataclass(slots=True)
class _DeferredValue:
    """Values with the callback that reports them."""

    callback: Callable[[Any], None]
    values: Any
    is_computing: bool = False


class DeferredQueue:
    """
    A rank's prints and logs, each behind those that came before it.

    Values that are printed in one step are computed with it, and are read when the next step is going to be given to the
    device: torch_xla waits for the former one there anyway, so that nothing is waited for twice, and nothing is compiled
    for them.
    """

    def __init__(self) -> None:
        self._waiting: deque[_DeferredValue] = deque()

    def add(self, callback: Callable[[Any], None], values: Any) -> None:
        """Report values: at once where they are there and nothing waits, else when they are."""
        if not self._waiting and not _on_device(values):
            callback(values)
            return
        if not self._waiting:
            xla.before_sync(self.turn)
            background_tasks.register(self.finish, self.salvage)
        context = copy_context()
        self._waiting.append(
            _DeferredValue(lambda item: context.run(callback, item), mapped(_as_it_is, values, records=True))
        )

    def turn(self) -> None:
        """The device is going to be given its pending work."""
        while self._waiting and self._waiting[0].is_computing:
            self._report_next()
        for item in self._waiting:
            item.is_computing = True

    def finish(self) -> None:
        """Report everything that is left."""
        left = [tensor for item in self._waiting if not item.is_computing for tensor in _on_device(item.values)]
        if left and not xla.are_computed(left):
            xla.sync()
        while self._waiting:
            self._report_next()

    def salvage(self) -> None:
        """
        Report what is left and can be known without the other ranks, after the function has failed.

        What the device was not yet given may hold what comes from others, who are at another point of their programs.
        """
        if not xla.are_connected():
            self.finish()
            return
        lost = 0
        while self._waiting:
            if self._waiting[0].is_computing or not _on_device(self._waiting[0].values):
                self._report_next()
            else:
                self._waiting.popleft()
                lost += 1
        if lost:
            warn_user(f"Values of {lost} prints and logs had not been computed yet when the function failed.")

    def _report_next(self) -> None:
        value = self._waiting.popleft()
        if not self._waiting:
            background_tasks.forget(self.finish)
        value.callback(mapped(_read, value.values, records=True))


_queue = DeferredQueue()


def deferred_queue() -> DeferredQueue:
    """This rank's queue."""
    return _queue


def _on_device(values: Any) -> list[Tensor]:
    return [item for item in leaves_of(values, records=True) if isinstance(item, Tensor) and item.device.type == "xla"]


def _read(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _as_it_is(value: Any) -> Any:
    """The value of now, also of a tensor that is changed in place before it is read; no computation of its own is made of it."""
    if isinstance(value, Tensor) and value.device.type == "xla":
        value = value.detach()
        return torch._from_functional_tensor(value) if torch._is_functional_tensor(value) else value
    return value
