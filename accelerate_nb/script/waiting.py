"""`await` outside of a function: a script's own loop runs what a notebook's loop would have."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

Result = TypeVar("Result")

_loop: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar("accelerate_nb_script_loop", default=None)


def wait(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """
    Run a coroutine to its end, on the same loop each time: tasks that one cell began go on while a later one waits.

    >>> wait(asyncio.sleep(0, "done"))
    'done'
    """
    return _kept_loop().run_until_complete(coroutine)


def _kept_loop() -> asyncio.AbstractEventLoop:
    loop = _loop.get()
    if loop is None or loop.is_closed():
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        _loop.set(loop)
        atexit.register(_close, loop)
    return loop


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """What still runs at the script's end is cancelled, as `asyncio.run` does it."""
    unfinished = asyncio.all_tasks(loop)
    for task in unfinished:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*unfinished, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
