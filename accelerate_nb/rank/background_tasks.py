"""What code inside a worker has begun in the background: the worker has not finished before it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from accelerate_nb.own import Own

Wait = Callable[[], object]
# Long enough for a device's step; whoever interrupts a function waits for its failure meanwhile.
_PATIENCE = 3.0


@dataclass(frozen=True, slots=True)
class _Begun:
    """Something that goes on: what waits for it, and what saves as much of it as one rank can by itself."""

    wait: Wait
    salvage: Wait | None


_begun: Own[list[_Begun]] = Own(list)


def begun(wait: Wait, salvage: Wait | None = None) -> None:
    """
    Something goes on in the background; `wait` returns when it is done, and raises if it failed.

    `salvage` is called instead where the function has failed: it does what can be done of it without the other ranks.
    """
    _begun.get().append(_Begun(wait, salvage))


def done(wait: Wait) -> None:
    """What was `begun` is over, or has been waited for."""
    going = _begun.get()
    for each in going:
        if each.wait == wait:
            going.remove(each)
            return


def finish() -> None:
    """Wait until all is done that was begun; raises what failed first."""
    going = _begun.get()
    while going:
        going.pop(0).wait()


def salvage(patience: float = _PATIENCE) -> None:
    """
    Save what can be saved after a failure: some seconds at most, and nothing that goes wrong is raised.

    The failure that is to be told after it is more important.
    """
    calls = [each.salvage for each in _begun.get() if each.salvage is not None]
    if not calls:
        return
    # in a thread, since who waits for a device can't be called back
    saving = threading.Thread(target=_call_each, args=(calls,), name="accelerate_nb salvage", daemon=True)
    with suppress(KeyboardInterrupt):
        saving.start()
        saving.join(patience)


def _call_each(calls: list[Wait]) -> None:
    for call in calls:
        with suppress(Exception):
            call()
