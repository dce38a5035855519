"""A worker's standard streams, pipes of its own for Python and for C, and what stands in the place of a screen and a keyboard."""

import builtins
import ctypes
import getpass
import io
import logging
import os
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn
from uuid import uuid4

from accelerate_nb.errors import StateError
from accelerate_nb.events.event_types import Display
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.transport.logging_state import stream_name

_LINE_BUFFERED = 1  # _IOLBF of stdio.h
_INPUT, _GETPASS = builtins.input, getpass.getpass


def take_over(stdout: int, stderr: int) -> None:
    """Make these pipes descriptors 1 and 2, and Python's streams; descriptor 0 becomes empty."""
    # handlers of logging that were made before the streams changed write to the new ones; this is the only list of all handlers
    handlers: list[Any] = [reference() for reference in list(logging._handlerList)]  # type: ignore[attr-defined]
    names = [stream_name(getattr(handler, "stream", None)) for handler in handlers]
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc]  # final for others; this process has just begun
    sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc]
    for handler, name in zip(handlers, names, strict=True):
        # some look it up each time
        with suppress(AttributeError):
            if name is not None:
                handler.stream = getattr(sys, name)
    # lines that C code prints come at once, as they would in a terminal; without this they wait for 4 kB or the end
    with suppress(OSError, ValueError, AttributeError):
        # another C library, with other names: its lines come late, and still come
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINE_BUFFERED, 0)


def flush() -> None:
    """Have everything written that Python and C hold back."""
    for stream in (sys.stdout, sys.stderr):
        # a function may have closed it, or replaced it by what has no such method
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def _stream(descriptor: int) -> io.TextIOWrapper:
    # surrogateescape: what came in as undecodable bytes (a file name) goes out as the same bytes
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="surrogateescape", closefd=False)


# --------------------------------------------------------------------------------------------------- screen and keyboard


def replace_screen_and_keyboard() -> None:
    """Make `display` send to the notebook, and `input`, `getpass` and `breakpoint` raise with the reason why they can't work."""
    builtins.display = display  # type: ignore[attr-defined]  # IPython puts it there too
    builtins.input = _no_input
    getpass.getpass = _no_password
    sys.breakpointhook = _no_breakpoint
    if "IPython.core.display_functions" in sys.modules:
        # what `from IPython.display import display` gives from now on
        for name in ("IPython.core.display_functions", "IPython.display"):
            sys.modules[name].display = display  # type: ignore[attr-defined]


def allow_prompts(no_input_because: str) -> None:
    """Give `input`, `getpass` and `breakpoint` back to a program; its `input` says why this rank reads nothing, where it doesn't."""
    builtins.input = partial(_empty_input, no_input_because) if no_input_because else _INPUT
    getpass.getpass = _GETPASS
    sys.breakpointhook = sys.__breakpointhook__


def display(
    *objects: Any,
    raw: bool = False,
    metadata: dict[str, Any] | None = None,
    display_id: str | bool | None = None,
    update: bool = False,
    **_: Any,
) -> Any:
    """
    Show objects in the notebook, under this rank; IPython's further options mean nothing here.

    A `display_id` names what is shown, and IPython's handle is returned, whose `update` replaces it.
    """
    name = uuid4().hex if display_id is True else str(display_id or "")
    if name and not objects:
        # nothing yet: the handle fills it
        objects, raw = ({"text/plain": ""},), True
    for shown in objects:
        data, about = (shown, {}) if raw else _formatted(shown)
        show(data, {**about, **(metadata or {})}, name, update=update)
    if not name:
        return None
    from IPython.display import DisplayHandle

    handle: Any = DisplayHandle(name)  # type: ignore[no-untyped-call]  # IPython leaves it without types
    # where no IPython was loaded when the worker began, the handle's own ones would print
    handle.display = partial(display, display_id=name)
    handle.update = partial(display, display_id=name, update=True)
    return handle


def show(data: dict[str, Any], metadata: dict[str, Any], name: str = "", *, update: bool = False) -> None:
    """Send a MIME bundle to the notebook."""
    rank = getattr(outlet(), "rank", 0)
    emit(Display(rank, as_plain(data), metadata, time.time(), name, update))


def _formatted(shown: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    from IPython.core.formatters import DisplayFormatter
    from IPython.core.pylabtools import print_figure

    formatter: Any = DisplayFormatter()
    to_png = partial(print_figure, fmt="png", base64=True)
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", to_png)
    data, about = formatter.format(shown)
    return data, about


def as_plain(data: dict[str, Any]) -> dict[str, Any]:
    """A MIME bundle as JSON can hold it: bytes as base64."""
    import base64

    return {
        kind: base64.b64encode(value).decode() if isinstance(value, bytes) else value for kind, value in data.items()
    }


def _no_input(prompt: object = "", /, *, name: str = "input") -> NoReturn:
    raise StateError(
        f"{name}({prompt!r}) was called in a worker, which has no keyboard. "
        f"Call {name}() in the notebook, and pass the text as an argument."
    )


def _no_password(prompt: str = "Password: ", stream: object = None, **_: Any) -> NoReturn:  # noqa: ARG001  # as getpass's
    _no_input(prompt, name="getpass")


def _empty_input(reason: str, prompt: object = "", /) -> str:
    try:
        return _INPUT(prompt)
    except EOFError as error:
        raise EOFError(f"{error}: {reason}.") from None


def _no_breakpoint(*_: Any, **__: Any) -> NoReturn:
    raise StateError(
        "breakpoint() was reached in a worker, which has no keyboard. "
        "Run with num_processes=1, engine='inline' to debug in the notebook itself, or print what you want to see."
    )
