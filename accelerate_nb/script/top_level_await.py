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
    loop.run_until_complete(_end(loop))
    loop.close()


async def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks that still run at the script's end, as `asyncio.run` does."""
    others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await loop.shutdown_asyncgens()
