"""The connection of a node's agent with each worker; and which part of the output of ranks on another machine goes to the launcher."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from accelerate_nb.config.environment import runs_folder
from accelerate_nb.events.event_types import LogLine
from accelerate_nb.events.run_folder import KEPT_RUNS
from accelerate_nb.reports.text_format import bytes_text
from accelerate_nb.transport.channel import Channel, blocking_pair
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.messages import RankOutput, StartWorkers
from accelerate_nb.transport.worker_spec import LocalWorker, WorkerDescriptors


@dataclass(frozen=True, slots=True)
class Connection:
    """The agent's ends; the worker's ends are in `far`, and closed here once the worker has them. `inbox` sends over `events`."""

    stdout: int
    stderr: int
    events: socket.socket
    inbox: Channel
    outcome: int
    stacks: int
    far: WorkerDescriptors

    @staticmethod
    def open() -> Connection:
        """Make all of them; nobody but this process and those it hands them to can open them."""
        opened: list[int] = []
        try:
            opened += os.pipe()
            opened += os.pipe()
            opened += (end.detach() for end in blocking_pair())
            opened += map(memory_file, ("accelerate_nb_outcome", "accelerate_nb_stacks"))
            # one after the other, so that the first is closed where the second fails
            opened += (os.dup(file) for file in opened[-2:])
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        out_read, out_write, err_read, err_write, near, far, outcome, stacks, its_outcome, its_stacks = opened
        for descriptor in (out_read, err_read):
            os.set_blocking(descriptor, False)
        ends = WorkerDescriptors(stdout=out_write, stderr=err_write, events=far, outcome=its_outcome, stacks=its_stacks)
        events = socket.socket(fileno=near)
        events.setblocking(False)
        return Connection(out_read, err_read, events, Channel(events), outcome, stacks, ends)

    def close(self) -> None:
        """Close the worker's ends here: its death must be seen as the end of the stream."""
        for descriptor in self.far.all():
            os.close(descriptor)

    def cut(self) -> None:
        """Close the agent's ends."""
        self.events.close()
        for descriptor in (self.stdout, self.stderr, self.outcome, self.stacks):
            os.close(descriptor)


def local_workers(
    request: StartWorkers, connections: Mapping[int, Connection], descriptors: Sequence[int]
) -> list[LocalWorker]:
    """The workers on this node, in the order of local ranks; `descriptors` are the payload's, unless inherited, and the rendezvous's socket."""
    *payload, store = descriptors if request.has_store else (*descriptors, -1)
    file, more = (payload[0], tuple(payload[1:])) if payload else (-1, ())
    workers = []
    for spec in request.specs:
        rank = spec.rank_info.rank
        ends = replace(connections[rank].far, payload=file, more=more, store=store if rank == 0 else -1)
        workers.append(LocalWorker(spec, ends))
    return workers


# A rank's output is sent as it comes up to so many bytes at once, beyond that at most so many a second.
BURST_SIZE = 1 << 20
BYTES_A_SECOND = 64 << 10
# The newest bytes that wait for their turn, and as many of the errors before them; what is older is left out.
HELD_SIZE = 64 << 10
# The folder of the logs of a node, in its folder of runs.
_FOLDER = "nodes"
# What a nested bar ends its drawing with: such a line is in the log and not among those to show.
_UP = b"\x1b[A"
# What a line that stands for a gap has in it.
_GAP = " left out here; whole log: node "


class OutputPart(NamedTuple):
    """What is sent of a rank's output: the bytes of its log, the lines to show, and how many bytes were left out before them."""

    raw: bytes
    lines: tuple[LogLine, ...]
    left_out: int = 0


class _LogPiece(NamedTuple):
    """A line of a log, and as it is shown, where it is shown."""

    raw: bytes
    line: LogLine | None

    @property
    def size(self) -> int:
        return len(self.raw) or (0 if self.line is None else len(self.line.text))


class RankLog:
    """The file `path` that holds all that a rank wrote, and the part of it that is sent and held back."""

    # A rank that writes much has its newest lines sent about once a second, and the errors among the others, up to `HELD_SIZE` each time.

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock = path, clock
        self.held: deque[_LogPiece] = deque()
        self._errors: list[_LogPiece] = []
        self._held_size = self._errors_size = self._left_out = 0
        # how many bytes may be sent now
        self._budget, self._at = float(BURST_SIZE), clock()
        self._is_whole = True
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            self._file, self._is_whole = -1, False

    def take(self, raw: bytes, lines: tuple[LogLine, ...]) -> OutputPart | None:
        """Write what the rank has written; returns what is to be sent at once."""
        self._refill()
        rest = memoryview(raw if self._is_whole else b"")
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            # the disk is full
            self._is_whole = False
        if not self._is_whole:
            # nothing else has what is left out
            held = self.rest() or OutputPart(b"", ())
            return OutputPart(held.raw + raw, held.lines + lines, held.left_out)
        size = len(raw) or sum(len(line.text) for line in lines)
        if not self.held and size <= self._budget:
            self._budget -= size
            return OutputPart(raw, lines)
        sent = []
        for piece in _pieces(raw, lines):
            if not self.held and piece.size <= self._budget:
                self._budget -= piece.size
                sent.append(piece)
            else:
                self._hold(piece)
        return _part(sent) if sent else None

    def due(self) -> OutputPart | None:
        """All that is held back, where its turn has come."""
        self._refill()
        # not each of many small gaps is worth a line
        is_due = self._budget >= (HELD_SIZE if self._left_out else self._held_size)
        return self.rest() if is_due else None

    def rest(self) -> OutputPart | None:
        """All that is held back, at once."""
        if not self.held:
            return None
        self._refill()
        part = _part([*self._errors, *self.held], self._left_out)
        # below zero, where it could not wait
        self._budget -= self._held_size + self._errors_size
        self.held.clear()
        self._errors.clear()
        self._held_size = self._errors_size = self._left_out = 0
        return part

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def _refill(self) -> None:
        now = self._clock()
        self._budget = min(float(BURST_SIZE), self._budget + (now - self._at) * BYTES_A_SECOND)
        self._at = now

    def _hold(self, piece: _LogPiece) -> None:
        if piece.size > HELD_SIZE:
            # its text is cut already
            raw = b"" if piece.line is None else piece.line.text.encode(errors="surrogateescape") + b"\n"
            self._left_out += len(piece.raw) - len(raw)
            piece = piece._replace(raw=raw)
        self.held.append(piece)
        self._held_size += piece.size
        while self._held_size > HELD_SIZE:
            oldest = self.held.popleft()
            self._held_size -= oldest.size
            is_error = oldest.line is not None and oldest.line.meaning == "error"
            if is_error and self._errors_size + oldest.size <= HELD_SIZE:
                self._errors.append(oldest)
                self._errors_size += oldest.size
            else:
                self._left_out += len(oldest.raw)


def _pieces(raw: bytes, lines: tuple[LogLine, ...]) -> Iterator[_LogPiece]:
    """The lines of a log with those that are shown of them; one that has not ended is at the end."""
    shown = iter(lines)
    for text in raw.split(b"\n")[:-1]:
        yield _LogPiece(text + b"\n", None if text.endswith(_UP) else next(shown, None))
    yield from (_LogPiece(b"", line) for line in shown)


def _part(pieces: list[_LogPiece], left_out: int = 0) -> OutputPart:
    return OutputPart(
        b"".join(piece.raw for piece in pieces),
        tuple(piece.line for piece in pieces if piece.line is not None),
        left_out,
    )


def is_gap(line: str) -> bool:
    """Whether a line of a rank's log stands for what is left out there."""
    return line.startswith("… ") and _GAP in line


def with_gap(report: RankOutput, node: str) -> RankOutput:
    """A report with a line where something is left out, which names the file on its node that holds all of it."""
    text = f"… {bytes_text(report.left_out)}{_GAP}{node}, {report.whole_log}"
    when = report.lines[0].time if report.lines and isinstance(report.lines[0], LogLine) else time.time()
    line = LogLine(report.rank, "stdout", text, when)
    return structs.replace(report, raw=f"{text}\n".encode() + report.raw, lines=(line, *report.lines))


def open_logs(name: str, ranks: Iterable[int], environment: Mapping[str, str]) -> tuple[dict[int, RankLog], int]:
    """The logs of a run's ranks in a folder of this node, none where it can't be made, and the descriptor that locks it, -1 for none."""
    parent = runs_folder(environment) / _FOLDER
    folder = parent / Path(name).name
    with suppress(OSError):
        found = sorted(parent.iterdir(), key=lambda path: path.stat().st_mtime)
        # the oldest of many go; others that remove old logs pass over a folder in use
        for old in found[: max(0, len(found) + 1 - KEPT_RUNS)]:
            if (lock := _locked(old, is_exclusive=True)) >= 0:
                os.close(lock)
                shutil.rmtree(old, ignore_errors=True)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return {}, -1
    lock = _locked(folder, is_exclusive=False)
    return {rank: RankLog(folder / f"rank_{rank}.log") for rank in ranks}, lock


def _locked(folder: Path, *, is_exclusive: bool) -> int:
    """The descriptor that locks a folder; -1 where it can't be."""
    import fcntl

    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, (fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return -1
    return descriptor
