"""The output of a node's workers: read from their pipes, and put together into lines."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Sequence

from accelerate_nb.events.line_reader import LineAssembler, OutputLine
from accelerate_nb.events.model import LogLine, Stream
from accelerate_nb.transport.connection import Connection

_READ_AT_ONCE = 1 << 20


class OutputReader:
    """
    Reads what ranks write; `on_output` gets a rank, its bytes, and the lines that they complete.

    Its descriptor becomes readable when something is there to read, on systems whose selectors have one. `wrote_last` is when
    something was written, on the monotonic clock.
    """

    def __init__(self, on_output: Callable[[int, bytes, tuple[LogLine, ...]], None]) -> None:
        self.wrote_last = time.monotonic()
        self._on_output = on_output
        self._assemblers: dict[tuple[int, Stream], LineAssembler] = {}
        self._pipes = selectors.DefaultSelector()

    def close(self) -> None:
        """Look at no pipe any more."""
        self._pipes.close()

    def fileno(self) -> int:
        """The selector's descriptor."""
        return self._pipes.fileno()

    def listen(self, rank: int, connection: Connection) -> None:
        """Read a rank's pipes from now on."""
        outputs: tuple[tuple[Stream, int], ...] = (("stdout", connection.stdout), ("stderr", connection.stderr))
        for stream, descriptor in outputs:
            self._assemblers[rank, stream] = LineAssembler()
            self._pipes.register(descriptor, selectors.EVENT_READ, (rank, stream, descriptor))

    def read(self) -> None:
        """Read what is there."""
        for key, _ in self._pipes.select(0):
            self._read_pipe(*key.data)

    def _read_pipe(self, rank: int, stream: Stream, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, _READ_AT_ONCE)
        except BlockingIOError:
            return False
        if not data:
            self._pipes.unregister(descriptor)
            return False
        self.wrote_last = time.monotonic()
        self._take_output(rank, stream, *self._assemblers[rank, stream].feed(data))
        return True

    def read_all_of(self, rank: int) -> None:
        """Read what a rank has written until now, which its pipes hold; a line that has not ended ends here."""
        for key in [key for key in self._pipes.get_map().values() if key.data[0] == rank]:
            self._read_pipe(*key.data)
            stream: Stream = key.data[1]
            self._take_output(rank, stream, *self._assemblers[rank, stream].close())

    def _take_output(self, rank: int, stream: Stream, raw: bytes, lines: Sequence[OutputLine]) -> None:
        if raw or lines:
            now = time.time()
            read = tuple(LogLine(rank, stream, line.text, now, line.open, line.meaning) for line in lines)
            self._on_output(rank, raw, read)

    def drain(self) -> None:
        """Read what is left; the processes have ended, and one that was not theirs may hold a pipe open."""
        for key in list(self._pipes.get_map().values()):
            while self._read_pipe(*key.data):
                pass
        for (rank, stream), assembler in self._assemblers.items():
            self._take_output(rank, stream, *assembler.close())
