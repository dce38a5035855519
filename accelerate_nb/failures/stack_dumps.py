"""The stacks of ranks, in the notebook's own lines: a thread of the rank replies with it, or the process writes it at a signal."""

import linecache
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from traceback import FrameSummary
from types import FrameType

from accelerate_nb.failures.traceback_format import frames_text
from accelerate_nb.sources.cells import CellSources

# The signal at which a process writes where its main thread is, for one in which no other thread gets to reply.
SIGNAL = signal.SIGUSR1
# What faulthandler writes, innermost frame first (see `faulthandler.dump_traceback`).
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_ANY = re.compile(r"^(?:Current thread|Thread) .*$", flags=re.MULTILINE)
_CURRENT = re.compile(r"^Current thread .*$", flags=re.MULTILINE)
# The states in which a process writes nothing, by the name that psutil gives them.
_PROCESS = "its process "
_STATES = {
    "stopped": "is stopped, by SIGSTOP or Ctrl+Z; `kill -CONT {pid}` lets it go on",
    "tracing-stop": "is stopped by a debugger",
    "disk-sleep": "waits in the kernel, without interruption, for a disk, a network file system or a driver",
    "zombie": "has ended, and nobody has taken note of it yet (a zombie)",
    "dead": "has ended",
}
_MOST_CALLS = 100
# How long the ranks get to write.
_TIMEOUT = 1.0
# After so many reads that find nothing new, they have written all.
_STABLE_READS = 3


def lengths(files: Sequence[int]) -> list[int]:
    """The bytes that each rank has written so far: the next dump follows them."""
    return [os.fstat(file).st_size for file in files]


def dumps_since(files: Sequence[int], before: Sequence[int]) -> list[str]:
    """The dump that each rank wrote since `before`; waits until all have, or a second."""
    deadline = time.monotonic() + _TIMEOUT
    seen, same = list(before), 0
    # it is written piece by piece, and a busy machine may pause a rank in between
    while same < _STABLE_READS and time.monotonic() < deadline:
        time.sleep(0.05)
        now = lengths(files)
        complete = now == seen and all(size > start for size, start in zip(now, before, strict=True))
        seen, same = now, same + 1 if complete else 0
    return [os.pread(file, 1 << 20, start).decode(errors="replace") for file, start in zip(files, before, strict=True)]


def process_state(pid: int | None) -> str:
    """The state in which a process writes no stack, in words; empty for one that runs or waits for an event, and for none."""
    import psutil

    # or no more files can be opened
    with suppress(psutil.Error, OSError):
        if pid is not None and (words := _STATES.get(psutil.Process(pid).status())) is not None:
            return f"{_PROCESS}{pid} {words.format(pid=pid)}"
    return ""


def is_state(text: str) -> bool:
    """Whether a text is a `process_state`, rather than a stack."""
    return text.startswith(_PROCESS)


def stacks_text(dumps: Mapping[int, str], sources: CellSources) -> str:
    """Every rank's stack, outermost call first; the ranks that are elsewhere than most are marked, where several are in one place."""
    stacks = {rank: main_thread(text) for rank, text in dumps.items()}
    positions = {rank: tuple((frame.filename, frame.lineno) for frame in frames) for rank, frames in stacks.items()}
    every = list(positions.values())
    common = max(every, key=every.count, default=())
    parts = []
    for rank, frames in stacks.items():
        is_odd = positions[rank] != common and every.count(common) > 1
        head = f"rank {rank}:" + ("   ◀ elsewhere than the others" if is_odd else "")
        state = dumps[rank] if is_state(dumps[rank]) else "it did not answer"
        lines = frames_text(frames, sources) or [f"  ({state})"]
        parts.append("\n".join([head, *lines]))
    return "\n".join(parts)


def crash_dump(file: int) -> str:
    """What faulthandler wrote of a fault of compiled code that ended a process; empty for other ends."""
    # the end of the file: replies stand before it
    end = os.pread(file, 1 << 20, max(0, os.fstat(file).st_size - (1 << 20))).decode(errors="replace")
    _, fatal, text = end.rpartition("Fatal Python error: ")
    return text if fatal else ""


def crash_text(dump: str, sources: CellSources) -> str:
    """The stack of a process in a `crash_dump`; empty where there is none."""
    # a fault in a thread that runs no Python is described by what the main thread did
    frames = _frames(_CURRENT.split(dump)[-1]) or main_thread(dump)
    return "\n".join(frames_text(frames, sources))


def as_faulthandler(frame: FrameType | None) -> str:
    """A thread's innermost calls, as many as faulthandler writes, in its words."""
    lines = ["Current thread (most recent call first):"]
    while frame is not None and len(lines) <= _MOST_CALLS:
        line = frame.f_lineno or "???"
        lines.append(f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines) + "\n"


def main_thread(text: str) -> list[FrameSummary]:
    """The main thread's frames, outermost first: faulthandler writes that thread last."""
    return _frames(_ANY.split(text)[-1])


def _frames(text: str) -> list[FrameSummary]:
    """The frames of the first thread of a text, outermost first."""
    frames = []
    for match in filter(None, map(_FRAME.match, _ANY.split(text, maxsplit=1)[0].split("\n"))):
        file, line = match["file"], int(match["line"]) if match["line"].isdigit() else 0
        frames.append(FrameSummary(file, line, match["name"], line=linecache.getline(file, line).strip()))
    return frames[::-1]
