"""Background tasks of code inside a worker: the worker has not finished before they are done."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

Wait = Callable[[], object]
# Long enough for a device's step; whoever interrupts a function waits for its failure meanwhile.
_TIMEOUT = 3.0


@dataclass(eq=False)
class _BackgroundTasks:
    """The tasks of this process that are not over, by what waits for each: what saves as much of it as one rank can by itself."""

    going: dict[Wait, Wait | None] = field(default_factory=dict)


_tasks = _BackgroundTasks()


def register(wait: Wait, salvage: Wait | None = None) -> None:
    """Register a task that `wait` waits for; `salvage` does what one rank can after a failure."""
    _tasks.going[wait] = salvage


def forget(wait: Wait) -> None:
    """Forget a registered task, since it is over, or has been waited for."""
    _tasks.going.pop(wait, None)


def finish() -> None:
    """Wait until all is done that was begun; raises what failed first."""
    while _tasks.going:
        wait = next(iter(_tasks.going))
        forget(wait)
        wait()


def salvage(timeout: float = _TIMEOUT) -> None:
    """Save what can be saved after a failure, some seconds at most."""
    # nothing that goes wrong here is raised: the failure that is to be reported after it is more important
    calls = [saves for saves in list(_tasks.going.values()) if saves is not None]
    if not calls:
        return

    def save() -> None:
        for call in calls:
            with suppress(Exception):
                call()

    # in a thread, since who waits for a device can't be called back
    saving = threading.Thread(target=save, name="accelerate_nb salvage", daemon=True)
    with suppress(KeyboardInterrupt):
        saving.start()
        saving.join(timeout)
