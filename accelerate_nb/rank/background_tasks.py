"""Background tasks of code inside a worker: the worker has not finished before they are done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

Wait = Callable[[], object]
# Long enough for a device's step; whoever interrupts a function waits for its failure meanwhile.
_TIMEOUT = 3.0


@dataclass(frozen=True, slots=True)
class _BackgroundTask:
    """A task in the background: what waits for it, and what saves as much of it as one rank can by itself."""

    wait: Wait
    salvage: Wait | None


class _BackgroundTasks:
    """The tasks of this process that have begun and are not over."""

    def __init__(self) -> None:
        self.going: list[_BackgroundTask] = []


_tasks = _BackgroundTasks()


def register(wait: Wait, salvage: Wait | None = None) -> None:
    """
    Register a task in the background; `wait` returns when it is done, and raises if it failed.

    `salvage` is called instead where the function has failed: it does what can be done of it without the other ranks.
    """
    _tasks.going.append(_BackgroundTask(wait, salvage))


def forget(wait: Wait) -> None:
    """Forget a registered task, since it is over, or has been waited for."""
    going = _tasks.going
    for task in going:
        if task.wait == wait:
            going.remove(task)
            return


def finish() -> None:
    """Wait until all is done that was begun; raises what failed first."""
    going = _tasks.going
    while going:
        going.pop(0).wait()


def salvage(timeout: float = _TIMEOUT) -> None:
    """
    Save what can be saved after a failure: some seconds at most, and nothing that goes wrong is raised.

    The failure that is to be reported after it is more important.
    """
    calls = [task.salvage for task in _tasks.going if task.salvage is not None]
    if not calls:
        return
    # in a thread, since who waits for a device can't be called back
    saving = threading.Thread(target=_call_all, args=(calls,), name="accelerate_nb salvage", daemon=True)
    with suppress(KeyboardInterrupt):
        saving.start()
        saving.join(timeout)


def _call_all(calls: list[Wait]) -> None:
    for call in calls:
        with suppress(Exception):
            call()
