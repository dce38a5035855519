"""Work that one process of a machine does, the first that reaches it, while the others wait for its end."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import IO

from accelerate_nb.errors import ScriptError

_OUR_FOLDER = os.path.dirname(__file__) + os.sep
# How often each line of the script was come to: all processes run the same lines.
_times: ContextVar[Counter[str]] = ContextVar("times", default=Counter())  # noqa: B039 - one for all threads and tasks


def once(work: Callable[[], int]) -> int:
    """
    Do some work in one process of this machine; gives its result in all of them.

    It is the first process that reaches it, so the others never wait for one that does not. The others wait until the
    work is done, and `ScriptError` is raised in them if the process that did it failed or is gone. A process that was not
    launched beside others does it itself.

    >>> once(lambda: os.system("make data"))  # doctest: +SKIP
    0
    """
    ranks_on_machine = _ranks_on_machine(os.environ)
    if ranks_on_machine < 2:
        return work()
    path = _folder() / _key(_line_of_the_script(), os.environ)
    # The operating system releases the lock of a process that ends, however it ends: no process waits for ever.
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        known = _read(file)
        if not known:
            _write(file, {"passed": 0})
            known = {"result": work(), "passed": 0}
        if "result" not in known:
            raise ScriptError(
                f"{_line_of_the_script()} is run once on each machine, and the process that ran it here did not reach "
                "its end. Its own error gives the reason; this process stops with it."
            )
        known["passed"] += 1
        _write(file, known)
        if known["passed"] >= ranks_on_machine:
            path.unlink(missing_ok=True)
        return known["result"]


def _ranks_on_machine(environment: Mapping[str, str]) -> int:
    """The number of processes of this launch on this machine; 1 where no launcher sets it."""
    size = environment.get("LOCAL_WORLD_SIZE", "")
    return int(size) if size.isdigit() and "LOCAL_RANK" in environment else 1


def _folder() -> Path:
    """A folder that no other user can write to."""
    folder = Path(tempfile.gettempdir()) / f"accelerate-nb-once-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # every user may write next to it, so it can also be another user's link
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ScriptError(
            f"{folder} was to be a folder that no other user can write to, but is not. Remove it, or set TMPDIR to a folder of "
            "your own."
        )
    return folder


def _key(line: str, environment: Mapping[str, str]) -> str:
    """A name that the processes of one launch on this machine share, one for each time that they reach the line."""
    import psutil

    times = _times.get()
    times[line] += 1
    parent = psutil.Process(os.getppid())
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    parts = [line, times[line], parent.pid, parent.create_time(), *(environment.get(name) for name in names)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _line_of_the_script() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OUR_FOLDER):
        frame = frame.f_back
    return "this line" if frame is None else f"{frame.f_code.co_filename}, line {frame.f_lineno}"


def _read(file: IO[str]) -> dict[str, int]:
    file.seek(0)
    text = file.read()
    known: dict[str, int] = json.loads(text) if text else {}
    return known


def _write(file: IO[str], known: Mapping[str, int]) -> None:
    file.seek(0)
    file.truncate()
    json.dump(known, file)
    file.flush()
