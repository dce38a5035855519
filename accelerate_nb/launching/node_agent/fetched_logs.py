"""Whole logs of ranks whose node has left out a part of them, fetched when somebody wants them and, within bounds, at the end of a run."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

from msgspec import structs

from accelerate_nb.events.model import LogLine
from accelerate_nb.events.run_folder import whole_log
from accelerate_nb.launching.node_agent.fetched_traces import FetchedTraces
from accelerate_nb.launching.node_agent.file_parts import ReadPart, fetched
from accelerate_nb.reports.text_format import bytes_text
from accelerate_nb.transport.messages import RankOutput

# A log that is longer stays on its node, where its gaps name it; so do all logs of a run together, beyond the other limits, at its end.
_MOST_BYTES, _MOST_SECONDS = 256 << 20, 60.0
_MOST_BYTES_AT_END, _MOST_SECONDS_AT_END = 32 << 20, 5.0
# What was fetched while the run goes on is in a folder of this name.
_FOLDER = "fetched"
# What a line that stands for a gap has in it.
_GAP = " left out here; whole log: node "


class FetchedLogs:
    """
    The logs of a run's ranks that are in full on their nodes alone, and the `traces` of their profiles; from any thread.

    >>> fetched = FetchedLogs()
    >>> fetched.note(3, read)
    >>> fetched.fetch(run.folder, 3)
    PosixPath('.../fetched/rank_3.log')
    """

    def __init__(self) -> None:
        self._readers: dict[int, ReadPart] = {}
        self._lock = threading.Lock()
        self.traces = FetchedTraces()

    def note(self, rank: int, read: ReadPart) -> None:
        """Note that a part of a rank's log was left out; `read` reads the whole."""
        # without the lock: who reads waits for the thread that notes
        self._readers[rank] = read

    def fetch(self, folder: Path, rank: int) -> Path | None:
        """All that a rank wrote so far, fetched into a run's folder; `None` where nothing is left out of its log, or it can't be had."""
        with self._lock:
            read = self._readers.get(rank)
            return None if read is None else _fetch(folder, rank, read, _MOST_BYTES, time.monotonic() + _MOST_SECONDS)

    def fetch_all(self, folder: Path) -> None:
        """Fetch the logs of ranks that have ended into a run's folder, as far as the limits allow, to stay there (`whole_log`)."""
        if not self._readers:
            return
        left, deadline = _MOST_BYTES_AT_END, time.monotonic() + _MOST_SECONDS_AT_END
        with self._lock:
            for rank, read in sorted(self._readers.items()):
                if (path := _fetch(folder, rank, read, left, deadline)) is not None:
                    left -= path.stat().st_size
                    os.replace(path, whole_log(folder, rank))
                    del self._readers[rank]
            shutil.rmtree(folder / _FOLDER, ignore_errors=True)

    def forget(self) -> None:
        """Forget the logs of an attempt that has ended."""
        with self._lock:
            self._readers.clear()


def _fetch(folder: Path, rank: int, read: ReadPart, most: int, deadline: float) -> Path | None:
    path = folder / _FOLDER / f"rank_{rank}.log"
    return path if fetched(path, read, most, deadline) else None


def is_gap(line: str) -> bool:
    """Whether a line of a rank's log stands for what is left out there."""
    return line.startswith("… ") and _GAP in line


def with_gap(report: RankOutput, node: str) -> RankOutput:
    """A report with a line where something is left out, which names the file on its node that holds all of it."""
    text = f"… {bytes_text(report.left_out)}{_GAP}{node}, {report.whole_log}"
    when = report.lines[0].time if report.lines and isinstance(report.lines[0], LogLine) else time.time()
    line = LogLine(report.rank, "stdout", text, when)
    return structs.replace(report, raw=f"{text}\n".encode() + report.raw, lines=(line, *report.lines))
