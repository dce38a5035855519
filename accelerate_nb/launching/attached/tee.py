"""What this process prints and sends while a block runs is heard here as well, and goes on its way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from accelerate_nb.events.capture import Line, LineAssembler
from accelerate_nb.events.emit import Outlet, connect, outlet
from accelerate_nb.events.model import Event, Stream


@contextmanager
def overhearing(
    rank: int, event: Callable[[Event], None], output: Callable[[Stream, bytes, list[Line]], None]
) -> Iterator[None]:
    """
    Inside the block, `event` is called with each event of this process, and `output` with what is written to Python's streams.

    What compiled code writes, or a logger that was made before, is not overheard; it goes where it always does.
    """
    before = outlet()
    connect(_Also(rank, event, before))
    try:
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(stack.enter_context(_heard(sys.stdout, "stdout", output))))
            stack.enter_context(redirect_stderr(stack.enter_context(_heard(sys.stderr, "stderr", output))))
            yield
    finally:
        connect(before)


class _Also:
    """An outlet that tells of an event here, too."""

    def __init__(self, rank: int, take: Callable[[Event], None], before: Outlet | None) -> None:
        self.rank = rank
        self._take, self._before = take, before

    def send(self, event: Event) -> None:
        """Tell of an event here, and to whoever listens to this process."""
        self._take(event)
        if self._before is not None:
            self._before.send(event)


class _Heard:
    """A stream that is written to as before, and tells of what was written."""

    def __init__(self, stream: TextIO, take: Callable[[bytes], None]) -> None:
        self._stream, self._take = stream, take

    def write(self, text: str) -> int:
        """Write, and tell of it."""
        written = self._stream.write(text)
        self._take(text.encode("utf-8", "surrogateescape"))
        return written

    def writelines(self, lines: Any) -> None:
        """Write one text after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _heard(stream: TextIO, name: Stream, output: Callable[[Stream, bytes, list[Line]], None]) -> Iterator[TextIO]:
    assembler, lock = LineAssembler(), threading.Lock()

    def take(data: bytes) -> None:
        with lock:
            output(name, *assembler.feed(data))

    try:
        yield cast("TextIO", _Heard(stream, take))
    finally:
        with lock:
            output(name, *assembler.close())
