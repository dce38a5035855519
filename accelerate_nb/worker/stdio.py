"""A worker's standard streams: pipes of its own, for Python and for C."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import sys
from contextlib import suppress
from typing import Any

from accelerate_nb.transport.logging_state import StreamName, stream_name

_LINE_BUFFERED = 1  # _IOLBF of stdio.h


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
