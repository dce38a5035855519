"""Locations of errors in terms of the notebook: `train.ipynb, cell 3, line 2`."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from accelerate_nb.sources.cells import cell_line, in_words, name_in_warnings
from accelerate_nb.transport.spawned_processes import send_main_by_value

if TYPE_CHECKING:
    from traceback import TracebackException

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RUNTIME = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Functions of a script, and the package that they run cells in.
_RUNNERS = {
    _RUNTIME + "top_level_await.py": os.sep + "asyncio" + os.sep,
    _RUNTIME + "shell.py": os.sep + "IPython" + os.sep,
    _RUNTIME + "ipython.py": os.sep + "IPython" + os.sep,
}


def name_in_tracebacks(file: str) -> None:
    """From now on, warnings, and an exception that ends the script at `file`, name the notebook's cells and lines."""
    # as in a notebook's ranks, loader workers and pools that start anew get functions without a name, too
    send_main_by_value()
    name_in_warnings()
    before = sys.excepthook

    def hook(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(error_type, KeyboardInterrupt):
            before(error_type, error, trace)
            return
        print(traceback_text(error, file), end="", file=sys.stderr)

    sys.excepthook = hook


def traceback_text(error: BaseException, file: str) -> str:
    """Python's text of an uncaught exception, with the cells and lines of the notebook in it."""
    from traceback import TracebackException

    from accelerate_nb.errors import AccelerateNbError

    whole = TracebackException.from_exception(error)
    # the exception, those that it came from, and those of a group
    waiting = [whole]
    while waiting:
        item = waiting.pop()
        _clean(item, file, ours=isinstance(error, AccelerateNbError))
        others = (item.__cause__, item.__context__, *(getattr(item, "exceptions", None) or ()))
        waiting += [other for other in others if other is not None]
    return in_words("".join(whole.format()))


def _clean(error: TracebackException, file: str, *, ours: bool) -> None:
    """Leave out how the script came to call its cells, and this package, unless an error of another's began there."""
    frames, kept = list(error.stack), []
    raised_in_package = bool(frames) and frames[-1].filename.startswith(_PACKAGE) and not ours
    hidden = None
    for frame in frames:
        # asyncio's and IPython's own frames stand below the functions that call them
        hidden = _RUNNERS.get(frame.filename, hidden if hidden and hidden in frame.filename else None)
        if frame.filename == file:
            is_left_out = cell_line(file, frame.lineno or 0) is None
        else:
            is_left_out = frame.filename.startswith(_RUNTIME if raised_in_package else _PACKAGE)
        if is_left_out or (hidden and hidden in frame.filename):
            continue
        if frame.filename == file and frame.name.startswith("_cell_"):
            frame.name = "<module>"
        kept.append(frame)
    error.stack[:] = kept or frames
