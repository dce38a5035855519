"""What is told of values that a device has still to compute: in order, without making it wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelerate_nb.events import pending
from accelerate_nb.notices import notice
from accelerate_nb.own import Own
from accelerate_nb.runtime import xla
from accelerate_nb.runtime.data.batches import leaves_of, mapped


@dataclass(slots=True)
class _Told:
    """Something to be told."""

    tell: Callable[[Any], None]
    values: Any
    is_computing: bool = False


class Line:
    """
    A rank's things to tell, each behind those that came before it.

    Values that are asked for in one step are computed with it, and are read when the next step is going to be given to the
    device: torch_xla waits for the former one there anyway, so that nothing is waited for twice, and nothing is compiled
    for them.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Told] = deque()

    def add(self, tell: Callable[[Any], None], values: Any) -> None:
        """Tell values: at once where they are there and nobody waits, else when they are."""
        if not self._waiting and not _on_device(values):
            tell(values)
            return
        if not self._waiting:
            xla.before_sync(self.turn)
            pending.begun(self.finish, self.salvage)
        self._waiting.append(_Told(partial(_told_in, copy_context(), tell), mapped(_as_it_is, values)))

    def turn(self) -> None:
        """The device is going to be given what was asked of it so far."""
        while self._waiting and self._waiting[0].is_computing:
            self._tell_next()
        for each in self._waiting:
            each.is_computing = True

    def finish(self) -> None:
        """Tell everything that is left."""
        left = [tensor for each in self._waiting if not each.is_computing for tensor in _on_device(each.values)]
        if left and not xla.are_computed(left):
            xla.sync()
        while self._waiting:
            self._tell_next()

    def salvage(self) -> None:
        """
        Tell what is left and can be known without the other ranks, after the function has failed.

        What the device was not yet given may hold what comes from others, who are at another point of their programs.
        """
        if xla.place()[1] == 1:
            self.finish()
            return
        lost = 0
        while self._waiting:
            if self._waiting[0].is_computing or not _on_device(self._waiting[0].values):
                self._tell_next()
            else:
                self._waiting.popleft()
                lost += 1
        if lost:
            notice(f"Values of {lost} prints and logs had not been computed yet when the function failed.")

    def _tell_next(self) -> None:
        told = self._waiting.popleft()
        if not self._waiting:
            pending.done(self.finish)
        told.tell(mapped(_read, told.values))


_line = Own(Line)


def told_line() -> Line:
    """This rank's line."""
    return _line.get()


def _told_in(context: Context, tell: Callable[[Any], None], values: Any) -> None:
    context.run(tell, values)


def _on_device(values: Any) -> list[Tensor]:
    return [each for each in leaves_of(values) if isinstance(each, Tensor) and each.device.type == "xla"]


def _read(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _as_it_is(value: Any) -> Any:
    """The value of now, also of a tensor that is changed in place before it is read; no computation of its own is made of it."""
    if isinstance(value, Tensor) and value.device.type == "xla":
        value = value.detach()
        return torch._from_functional_tensor(value) if torch._is_functional_tensor(value) else value
    return value
