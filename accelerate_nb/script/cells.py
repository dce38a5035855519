"""What a script does for a cell: its last value and `display` are text, its `await` has a loop, and a cell that is text runs."""

from __future__ import annotations

import ast
import atexit
import builtins
from collections.abc import Coroutine
from contextvars import ContextVar
from inspect import CO_COROUTINE
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate_nb.export.python_source import result_of

if TYPE_CHECKING:
    import asyncio

Result = TypeVar("Result")

# On one line, these are written by IPython, which is slow to import, as by Python itself.
_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_loop: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar("accelerate_nb_script_loop", default=None)


def shown(value: Any) -> None:
    """Show the value of a cell's last line, as a notebook does: nothing for None."""
    if value is not None:
        display(value)


def display(*objects: Any, **options: Any) -> Any:
    """Show objects: in a notebook, or in the panel of a run, where this script runs in one, and as text anywhere else."""
    # takes what IPython's `display` takes; with `display_id`, gives an object whose `update` shows something else below
    other = getattr(builtins, "display", None)
    if other is not None:
        return other(*objects, **options)
    for item in objects:
        print(_text_of(item))
    return SimpleNamespace(display=display, update=display) if options.get("display_id") is not None else None


def _text_of(value: Any) -> str:
    """The text of a display; a figure is a line with its size."""
    if _is_simple(value) and len(text := repr(value)) < 80:
        return text
    from IPython.core.display import Latex, Markdown
    from IPython.core.formatters import PlainTextFormatter

    return str(value.data if isinstance(value, (Latex, Markdown)) else PlainTextFormatter()(value))


def _is_simple(value: Any) -> bool:
    if type(value) is dict:
        value = (*value.keys(), *value.values())
    return all(map(_is_simple, value)) if type(value) in (list, tuple) else type(value) in _SIMPLE


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

    asyncio.runners._cancel_all_tasks(loop)  # type: ignore[attr-defined] # no public function does it
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def execute(source: str, file: str, above: int, names: dict[str, Any]) -> None:
    """Run code of a script, which stands there below so many lines, with these names; its last value is shown."""
    tree = ast.increment_lineno(ast.parse(source), above)
    parts: list[tuple[Any, str]] = [(tree, "exec")]
    if result_of(source) is not None:
        last: Any = tree.body.pop()
        parts.append((ast.Expression(last.value), "eval"))
    for part, mode in parts:
        code = compile(part, file, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        value = eval(code, names)
        shown(wait(value) if code.co_flags & CO_COROUTINE else value)
