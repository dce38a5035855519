"""`await` outside of a function, and cells that are text: a script's own loop runs what a notebook's loop would have."""

from __future__ import annotations

import ast
import atexit
from collections.abc import Coroutine
from contextvars import ContextVar
from inspect import CO_COROUTINE
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate_nb.export.python_source import result_of
from accelerate_nb.script.display import shown

if TYPE_CHECKING:
    import asyncio

Result = TypeVar("Result")

_loop: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar("accelerate_nb_script_loop", default=None)


def wait(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end, always on the same loop: tasks that one cell began go on while a later one waits."""
    import asyncio

    loop = _loop.get()
    if loop is None or loop.is_closed():
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        _loop.set(loop)
        atexit.register(_close, loop)
    return loop.run_until_complete(coroutine)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks that still run at the script's end, as `asyncio.run` does."""
    import asyncio

    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def execute(source: str, file: str, above: int, names: dict[str, Any]) -> None:
    """Run code of a script, which stands there below so many lines, with these names; its last value is shown."""
    result = result_of(source)
    tree = ast.increment_lineno(ast.parse(source), above)
    parts: list[tuple[Any, str]] = [(tree, "exec")]
    if result is not None:
        tree.body, last = tree.body[:-1], tree.body[-1]
        assert isinstance(last, ast.Expr)
        parts.append((ast.Expression(last.value), "eval"))
    for part, mode in parts:
        code = compile(part, file, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        value = eval(code, names)
        value = wait(value) if code.co_flags & CO_COROUTINE else value
        if mode == "eval":
            shown(value)
