"""What code inside a worker has begun in the background: the worker has not finished before it is done."""

from __future__ import annotations

from collections.abc import Callable

from accelerate_nb.own import Own

Wait = Callable[[], object]
_waits: Own[list[Wait]] = Own(list)


def begun(wait: Wait) -> None:
    """Something goes on in the background; `wait` returns when it is done, and raises if it failed."""
    _waits.get().append(wait)


def done(wait: Wait) -> None:
    """What was `begun` is over, or has been waited for."""
    waits = _waits.get()
    if wait in waits:
        waits.remove(wait)


def finish() -> None:
    """Wait until all is done that was begun; raises what failed first."""
    waits = _waits.get()
    while waits:
        waits.pop(0)()
