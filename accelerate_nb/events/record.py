"""What a run leaves on disk: every rank's output, every event, and how it ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from accelerate_nb.events.model import DeviceSample, Event, HostSample, LogLine, Metric, Progress, to_line

# Run folders beyond this number are removed, oldest first, when a run has ended.
KEPT_RUNS = 50
# How `new_folder` names them.
_RUN = re.compile(r"\d{4}-\d\d-\d\d_\d{6}_")


class Record:
    r"""
    A run's folder: `rank_N.log` (each rank's bytes), `metrics.jsonl`, `events.jsonl`, `status.json`.

    Log lines are not among the events, nor is what would fill a disk in a long run: bars that move, how busy things are.

    >>> with Record(folder) as record:
    ...     record.output(0, b"a line\n")
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._files: dict[str, IO[bytes]] = {}
        # why not everything could be kept: a full disk, a folder that was removed
        self.trouble: OSError | None = None

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def output(self, rank: int, data: bytes) -> None:
        """Add whole lines to a rank's log."""
        with self._as_far_as_possible():
            self._file(f"rank_{rank}.log").write(data)

    def event(self, event: Event) -> None:
        """Keep an event, of bars only their ends; log lines are in the ranks' logs already."""
        if isinstance(event, (LogLine, DeviceSample, HostSample)) or (isinstance(event, Progress) and not event.closed):
            return
        line = to_line(event)
        with self._as_far_as_possible():
            self._file("events.jsonl").write(line)
            if isinstance(event, Metric):
                self._file("metrics.jsonl").write(line)

    def status(self, **facts: Any) -> None:
        """Write `status.json` anew; a reader never sees half of it."""
        beside = self.folder / "status.json.new"
        with self._as_far_as_possible():
            beside.write_text(json.dumps({**facts, "time": time.time()}, indent=1, default=str))
            os.replace(beside, self.folder / "status.json")

    def flush(self) -> None:
        """Make what was kept so far readable to others."""
        for file in self._files.values():
            with self._as_far_as_possible():
                file.flush()

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            with self._as_far_as_possible():
                file.close()
        self._files.clear()

    @contextmanager
    def _as_far_as_possible(self) -> Iterator[None]:
        """A training run of hours is worth more than its record."""
        try:
            yield
        except OSError as error:
            self.trouble = self.trouble or error

    def _file(self, name: str) -> IO[bytes]:
        if name not in self._files:
            self._files[name] = (self.folder / name).open("ab", buffering=1 << 16)
        return self._files[name]


def new_folder(parent: Path, name: str) -> Path:
    """A fresh folder for a run under `parent`, named after the time and the function."""
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    stamp = time.strftime("%Y-%m-%d_%H%M%S")
    label = "".join(letter if letter.isalnum() else "_" for letter in name).strip("_")[:40] or "run"
    for attempt in range(10_000):
        folder = parent / (f"{stamp}_{label}" if attempt == 0 else f"{stamp}_{label}_{attempt}")
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{parent} holds 10,000 runs of {label} that started at {stamp}.")


def prune(parent: Path) -> None:
    """Remove the oldest finished runs beyond those that are kept; only folders that a run made are touched."""
    if not parent.is_dir():
        # somebody has tidied up
        return
    names = sorted(entry.name for entry in os.scandir(parent) if _RUN.match(entry.name))
    for name in names[: max(0, len(names) - KEPT_RUNS)]:
        # one without a status still runs
        if (parent / name / "status.json").is_file():
            shutil.rmtree(parent / name, ignore_errors=True)
