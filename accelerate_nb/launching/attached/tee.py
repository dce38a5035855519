"""A copy of what this process prints and sends while a block runs; the original goes on its way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from accelerate_nb.events.line_reader import LineAssembler, OutputLine
from accelerate_nb.events.model import Event, Stream
from accelerate_nb.rank.event_sink import EventSink, connect, outlet


@contextmanager
def tee_output(
    rank: int, event: Callable[[Event], None], output: Callable[[Stream, bytes, list[OutputLine]], None]
) -> Iterator[None]:
    """
    Inside the block, `event` is called with each event of this process, and `output` with what is written to Python's streams.

    What compiled code writes, or a logger that was made before, is not copied; it goes where it always does.
    """
    before = outlet()
    connect(_TeeSink(rank, event, before))
    try:
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(stack.enter_context(_teed(sys.stdout, "stdout", output))))
            stack.enter_context(redirect_stderr(stack.enter_context(_teed(sys.stderr, "stderr", output))))
            yield
    finally:
        connect(before)


class _TeeSink:
    """A sink that passes events on to two receivers."""

    def __init__(self, rank: int, take: Callable[[Event], None], before: EventSink | None) -> None:
        self.rank = rank
        self._take, self._before = take, before

    def send(self, event: Event) -> None:
        """Pass an event to the new receiver, then to the one before."""
        self._take(event)
        if self._before is not None:
            self._before.send(event)


class _TeeStream:
    """A stream that is written to as before, and passes on a copy."""

    def __init__(self, stream: TextIO, take: Callable[[bytes], None]) -> None:
        self._stream, self._take = stream, take

    def write(self, text: str) -> int:
        """Write, and pass on a copy."""
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
def _teed(stream: TextIO, name: Stream, output: Callable[[Stream, bytes, list[OutputLine]], None]) -> Iterator[TextIO]:
    assembler, lock = LineAssembler(), threading.Lock()

    def take(data: bytes) -> None:
        with lock:
            output(name, *assembler.feed(data))

    try:
        yield cast("TextIO", _TeeStream(stream, take))
    finally:
        with lock:
            output(name, *assembler.close())
