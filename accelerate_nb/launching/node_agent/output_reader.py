"""The output of a group's workers: read from their pipes, and put together into lines."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from accelerate_nb.events.line_reader import LineAssembler, OutputLine
from accelerate_nb.events.model import LogLine, Stream
from accelerate_nb.launching.run_context import RunContext
from accelerate_nb.transport.connection import Connection

_READ_AT_ONCE = 1 << 20


class OutputReader:
    """
    Reads what ranks write, keeps it in the run's folder, and shows its lines in the run's state.

    `on_output` is called where something was written, at `wrote_last` on the monotonic clock. Its descriptor becomes readable
    when something is there to read, on systems whose selectors have one.
    """

    def __init__(self, run_context: RunContext, on_output: Callable[[], None]) -> None:
        self.wrote_last = time.monotonic()
        self._run_context, self._on_output = run_context, on_output
        self._assemblers: dict[tuple[int, Stream], LineAssembler] = {}
        self._pipes = selectors.DefaultSelector()

    def __enter__(self) -> OutputReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
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
            self._on_output()
        if raw:
            self._run_context.record.output(rank, raw)
        now, apply = time.time(), self._run_context.view.apply
        for line in lines:
            apply(LogLine(rank, stream, line.text, now, line.open, line.meaning))

    def drain(self) -> None:
        """Read what is left; the processes have ended, and one that was not theirs may hold a pipe open."""
        for key in list(self._pipes.get_map().values()):
            while self._read_pipe(*key.data):
                pass
        for (rank, stream), assembler in self._assemblers.items():
            self._take_output(rank, stream, *assembler.close())
