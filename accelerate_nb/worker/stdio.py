"""A worker's standard streams, pipes of its own for Python and for C, and what stands in the place of a screen and a keyboard."""

from __future__ import annotations

import builtins
import ctypes
import io
import logging
import os
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from accelerate_nb.errors import StateError
from accelerate_nb.events.model import Display
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.transport.logging_state import StreamName, stream_name

_LINE_BUFFERED = 1  # _IOLBF of stdio.h
_INPUT = builtins.input


def take_over(stdout: int, stderr: int) -> None:
    """Make these pipes descriptors 1 and 2, and Python's streams; descriptor 0 becomes empty."""
    handlers = _handlers_on_streams()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc]  # final for others; this process has just begun
    sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc]
    _repoint_logging(handlers)
    _line_buffer_c()


def flush() -> None:
    """Have everything written that Python and C hold back."""
    for stream in (sys.stdout, sys.stderr):
        # a function may have closed or replaced it
        with suppress(OSError, ValueError):
            stream.flush()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def _stream(descriptor: int) -> io.TextIOWrapper:
    # surrogateescape: what came in as undecodable bytes (a file name) goes out as the same bytes
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="surrogateescape", closefd=False)


def _handlers_on_streams() -> list[tuple[Any, StreamName]]:
    """The handlers of logging that write to a standard stream, with its name."""
    # the only list of all handlers
    handlers = [reference() for reference in list(logging._handlerList)]  # type: ignore[attr-defined]
    found = [(handler, stream_name(getattr(handler, "stream", None))) for handler in handlers]
    return [(handler, name) for handler, name in found if name is not None]


def _repoint_logging(handlers: list[tuple[Any, StreamName]]) -> None:
    """Handlers made before the streams changed write to the new ones."""
    for handler, name in handlers:
        with suppress(AttributeError):
            # some look it up each time
            handler.stream = getattr(sys, name)


def _line_buffer_c() -> None:
    """Lines that C code prints come at once, as they would in a terminal; without this they wait for 4 kB or the end."""
    try:
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINE_BUFFERED, 0)
    except (OSError, ValueError, AttributeError):
        # another C library, with other names: its lines come late, and still come
        return


# --------------------------------------------------------------------------------------------------- screen and keyboard


def replace_screen_and_keyboard() -> None:
    """Make `display` send to the notebook, and `input` and `breakpoint` raise with the reason why they can't work."""
    builtins.display = display  # type: ignore[attr-defined]  # IPython puts it there too
    builtins.input = _no_input
    sys.breakpointhook = _no_breakpoint
    shown = sys.modules.get("IPython.core.display_functions")
    if shown is None:
        return
    shown.display = display  # type: ignore[attr-defined]  # what `from IPython.display import display` gives from now on
    sys.modules["IPython.display"].display = display  # type: ignore[attr-defined]


def allow_prompts() -> None:
    """Give `input` and `breakpoint` back to a program that has somebody's standard input, or finds out that it has none."""
    builtins.input = _INPUT
    sys.breakpointhook = sys.__breakpointhook__


def display(*objects: Any, raw: bool = False, metadata: dict[str, Any] | None = None, **_: Any) -> None:
    """
    Show objects in the notebook, under this rank.

    Like `IPython.display.display`, whose other options (`display_id`, `transient`, ...) have no meaning across processes
    and are passed over.
    """
    rank = getattr(outlet(), "rank", 0)
    for shown in objects:
        data, about = (shown, {}) if raw else _formatted(shown)
        emit(Display(rank=rank, data=as_plain(data), metadata={**about, **(metadata or {})}, time=time.time()))


def _formatted(shown: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    from IPython.core.formatters import DisplayFormatter

    formatter = DisplayFormatter()
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", _figure)
    data, about = formatter.format(shown)  # type: ignore[no-untyped-call]
    return data, about


def _figure(figure: Any) -> Any:
    from IPython.core.pylabtools import print_figure

    return print_figure(figure, "png", base64=True)  # type: ignore[no-untyped-call]


def as_plain(data: dict[str, Any]) -> dict[str, Any]:
    """A MIME bundle as JSON can hold it: bytes as base64."""
    import base64

    return {
        kind: base64.b64encode(value).decode() if isinstance(value, bytes) else value for kind, value in data.items()
    }


def _no_input(prompt: object = "", /) -> NoReturn:
    raise StateError(
        f"input({prompt!r}) was called in a worker, which has no keyboard. "
        "Call input() in the notebook, and pass the text as an argument."
    )


def _no_breakpoint(*_: Any, **__: Any) -> NoReturn:
    raise StateError(
        "breakpoint() was reached in a worker, which has no keyboard. "
        "Run with num_processes=1 to debug in the notebook itself, or print what you want to see."
    )
