"""What a script does for a cell: its last value and `display` are text, its `await` has a loop, and a cell that is text runs."""

from __future__ import annotations

import ast
import atexit
import builtins
from collections.abc import Coroutine
from contextvars import ContextVar
from inspect import CO_COROUTINE
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate_nb.export.python_source import result_of

if TYPE_CHECKING:
    import asyncio

Result = TypeVar("Result")

_loop: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar("accelerate_nb_script_loop", default=None)


def shown(value: Any) -> None:
    """Show the value of a cell's last line, as a notebook does: nothing for None."""
    if value is not None:
        display(value)


def display(*objects: Any, **options: Any) -> Any:
    """Show objects: in a notebook or the panel of a run, where this script runs in one; elsewhere as text, a figure by its size."""
    # takes what IPython's `display` takes; with `display_id`, gives an object whose `update` shows something else
    other = getattr(builtins, "display", None)
    if other is not None:
        return other(*objects, **options)
    from IPython.core.display import Latex, Markdown  # slow to import
    from IPython.core.formatters import PlainTextFormatter

    for item in objects:
        print(item.data if isinstance(item, (Latex, Markdown)) else PlainTextFormatter()(item))
    return DisplayHandle() if options.get("display_id") is not None else None


class DisplayHandle:
    """A display that can be updated: its new text is printed below, since printed text stays."""

    def display(self, obj: Any, **_: Any) -> None:
        """Show an object."""
        display(obj)

    update = display


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
        value = wait(value) if code.co_flags & CO_COROUTINE else value
        shown(value)
