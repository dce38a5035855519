"""The files of a run: every rank's output, every event, and how it ended."""

import errno
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from accelerate_nb.errors import LaunchError
from accelerate_nb.events import event_types
from accelerate_nb.events.event_codec import harmless_value, to_line

# Run folders beyond this number are removed, oldest first, when a run has ended.
KEPT_RUNS = 50
# How `new_folder` names them.
_RUN = re.compile(r"\d{4}-\d\d-\d\d_\d{6}_")
# A former attempt's logs are in a folder of this name, with its number.
ATTEMPT_FOLDER = "attempt_{}"
# A reader of the files sees what is no older than this, in seconds.
_BETWEEN_FLUSHES = 0.5
# What many ranks write is written together so often; the first line after a pause is written at once.
BETWEEN_OUTPUT_FLUSHES = 0.25
# Errors that free space ends: of a disk, and of a user's share of it.
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# The file that the process of a detached run holds locked.
_LOCK = "host.lock"


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as it is shown to people, who may share what they see: `~` stands for the home folder."""
    try:
        return os.path.join("~", Path(path).relative_to(Path.home()))
    except (ValueError, RuntimeError):
        # it is elsewhere, or nobody has a home
        return os.fspath(path)


def record_problem(folder: Path, trouble: OSError | None) -> str:
    """Why not all of a run is kept in its folder, and what to do; empty where the folder is there and took everything."""
    if not folder.is_dir():
        return "Not all of the run is kept: its folder was removed, with the output in it."
    if trouble is None:
        return ""
    begin = "Free space there, or set" if trouble.errno in _DISK_FULL else "Set"
    return (
        f"Not all of the run is kept in {shown_path(folder)}: {trouble.strerror or trouble}. What could not be written is lost. "
        f"{begin} another folder for runs: the setting `folder` (ACCELERATE_NB_FOLDER)."
    )


class RunRecorder:
    """A run's folder: `rank_N.log` (each rank's bytes), `metrics.jsonl`, `events.jsonl`, `status.json`."""

    # The logs are those of the newest attempt; after a restart the former ones are in `attempt_0`, `attempt_1`, ...
    # Neither log lines are among the events nor what would fill a disk: bars that move, loads. Events are written half a second late,
    # but for states and failures.

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._files: dict[str, IO[bytes]] = {}
        # why not everything could be kept: a full disk, a folder that was removed
        self.trouble: OSError | None = None
        self._flushed = time.monotonic()
        # the logs with lines that are not written yet, and when some were
        self._unwritten: set[str] = set()
        self._unwritten_lock = threading.Lock()
        self._output_flushed = float("-inf")

    def output(self, rank: int, data: bytes) -> None:
        """Add whole lines to a rank's log."""
        with self._as_far_as_possible():
            file = self._file(f"rank_{rank}.log")
            file.write(data)
            # it is what one read of a rank's pipe gave, so there are no more writes than reads
            file.flush()

    def add_output(self, rank: int, data: bytes) -> None:
        """Add whole lines to a rank's log, where `flush_output` is called from time to time: many ranks' lines are written together."""
        name = f"rank_{rank}.log"
        with self._as_far_as_possible():
            self._file(name).write(data)
        with self._unwritten_lock:
            self._unwritten.add(name)
        self.flush_output(time.monotonic())

    @property
    def has_unwritten(self) -> bool:
        """Whether `add_output` has added what is not written yet."""
        return bool(self._unwritten)

    def flush_output(self, now: float) -> None:
        """Write what `add_output` has added, unless some was written just before, on the monotonic clock."""
        if self._unwritten and now - self._output_flushed >= BETWEEN_OUTPUT_FLUSHES:
            self._output_flushed = now
            self._flush_logs()

    def _flush_logs(self) -> None:
        with self._unwritten_lock:
            names, self._unwritten = self._unwritten, set()
        for name in names:
            if (file := self._files.get(name)) is not None:
                with self._as_far_as_possible():
                    file.flush()

    def put_logs_aside(self, attempt: int) -> None:
        """Move the logs of an attempt that has ended into a folder of its own; each rank's next line begins another log."""
        with self._as_far_as_possible():
            aside = self.folder / ATTEMPT_FOLDER.format(attempt)
            aside.mkdir(mode=0o700, exist_ok=True)
            for name in [name for name in self._files if name.endswith(".log")]:
                self._files.pop(name).close()
                os.replace(self.folder / name, aside / name)

    def event(self, event: event_types.Event) -> None:
        """Keep an event, of bars only their ends; log lines are in the ranks' logs already."""
        if isinstance(
            event, (event_types.LogLine, event_types.DeviceSample, event_types.HostSample, event_types.HeldAt)
        ) or (isinstance(event, event_types.Progress) and not event.closed):
            return
        line = to_line(event)
        if is_change := isinstance(event, (event_types.Failure, event_types.StateChange)):
            # who reads of it finds the lines that led to it
            self._flush_logs()
        with self._as_far_as_possible():
            events = self._file("events.jsonl")
            events.write(line)
            if is_change:
                # who reads a line finds what came before it: the nodes, the state of its rank
                events.flush()
            if isinstance(event, event_types.Metric):
                self._file("metrics.jsonl").write(line)
        if time.monotonic() - self._flushed > _BETWEEN_FLUSHES:
            self.flush()

    def status(self, **facts: Any) -> None:
        """Rewrite `status.json` with these facts and the process that writes them; a reader never sees half of it."""
        import psutil

        # who reads of the end finds all that led to it
        self.flush()
        began, host = psutil.Process().create_time(), socket.gethostname()
        this_process = {"pid": os.getpid(), "process_began": began, "host": host, "time": time.time()}
        beside = self.folder / "status.json.new"
        with self._as_far_as_possible():
            beside.write_text(json.dumps({**facts, **this_process}, indent=1, default=str))
            os.replace(beside, self.folder / "status.json")

    def flush(self) -> None:
        """Make what was kept so far readable to others."""
        self._flushed = time.monotonic()
        # a copy: other threads open files meanwhile
        for file in list(self._files.values()):
            with self._as_far_as_possible():
                file.flush()

    def close(self) -> None:
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
    """A fresh folder for a run under `parent`, named after the time and the function; raises `LaunchError` where it can't write."""
    stamp = time.strftime("%Y-%m-%d_%H%M%S")
    label = "".join(char if char.isalnum() else "_" for char in name).strip("_")[:40] or "run"
    problem: OSError = FileExistsError(f"{parent} holds 10,000 runs of {label} that started at {stamp}.")
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for number in range(10_000):
            folder = parent / (f"{stamp}_{label}" if number == 0 else f"{stamp}_{label}_{number}")
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                return folder
    except OSError as error:
        problem = error
    raise LaunchError(
        f"What ranks write is kept in {parent}, and no folder can be made there: {problem.strerror or problem}. Name "
        "another folder: --folder PATH, folder='PATH', or the variable ACCELERATE_NB_FOLDER."
    )


def prune(parent: Path) -> None:
    """Remove the oldest runs that are over beyond those that are kept; only folders that a run made are touched."""
    names = folders(parent)
    for name in names[: max(0, len(names) - KEPT_RUNS)]:
        if is_over(parent / name, status_of(parent / name)):
            shutil.rmtree(parent / name, ignore_errors=True)


def folders(parent: Path) -> list[str]:
    """The names of the folders that runs have made under `parent`, oldest first."""
    if not parent.is_dir():
        # it was deleted
        return []
    return sorted(entry.name for entry in os.scandir(parent) if _RUN.match(entry.name))


# The types of what `status.json` holds, as far as somebody reads it.
_STATUS_TYPES: dict[str, Any] = {
    "state": event_types.State,
    **dict.fromkeys(("name", "function", "why", "host", "control", "results", "slurm_job", "slurm_node"), str),
    "error": str | None,
    **dict.fromkeys(("started", "time", "process_began", "stop_grace_period"), float),
    "ended": float | None,
    **dict.fromkeys(("pid", "ranks", "restarts", "main_rank"), int),
    "detached": bool,
    "devices": tuple[str, ...],
    "progress": tuple[str, float, float] | None,
    "curve": tuple[str, str] | None,
    "metrics": dict[str, float],
    **dict.fromkeys(("metrics_of", "arguments"), dict[str, str]),
    "settings": dict[str, Any],
}
# Bytes of a large machine, or seconds since 1970 with room.
_LARGEST = 10**15
_DEEPEST = 50


def status_of(folder: Path) -> dict[str, Any] | None:
    """The content of a run's `status.json`; `None` where there is none yet, without what can't be read."""
    try:
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(status, dict) or not is_drawable({**status, "metrics": 0}):
        return {}
    found = {}
    for name, value in status.items():
        with suppress(ValueError):
            msgspec.convert(value, _STATUS_TYPES.get(name, Any))
            found[name] = harmless_value(value, is_name=name not in {"why", "error"})
    return found


def is_drawable(value: Any, depth: int = 0) -> bool:
    """Whether all numbers of a plain value are finite and of a size that means something, and none is nested deeply."""
    if isinstance(value, (list, tuple, dict)):
        parts = value.values() if isinstance(value, dict) else value
        return depth < _DEEPEST and all(is_drawable(part, depth + 1) for part in parts)
    return not isinstance(value, (int, float)) or abs(value) <= _LARGEST


def is_over(folder: Path, status: Mapping[str, Any] | None) -> bool:
    """Whether the run of a folder, with this status, is over: its status is final, or the process that wrote it has gone."""
    if status is None:
        # it is only about to begin
        return False
    if status.get("state") not in event_types.GOING_ON:
        return True
    if status.get("host") != socket.gethostname():
        # of another machine's process nothing is known
        return False
    if status.get("detached"):
        return not _is_locked(folder)
    import psutil

    try:
        # numbers of processes are given again, but not with the same beginning
        return bool(abs(psutil.Process(status["pid"]).create_time() - status["process_began"]) >= 1)
    except (psutil.Error, KeyError, TypeError, ValueError):
        return True


def hold_lock(folder: Path) -> int:
    """Lock a run's folder for the process that conducts the run, until the returned descriptor is closed, or the process ends."""
    import fcntl

    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _is_locked(folder: Path) -> bool:
    import fcntl

    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
