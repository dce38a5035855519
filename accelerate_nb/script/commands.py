"""Commands to a shell, and other work that one process of a machine does, the first that reaches it, while the others wait for its end."""

import codecs
import fcntl
import hashlib
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate_nb.errors import ScriptError
from accelerate_nb.script.ranks import current_ranks

# Braces and dollar signs, which may stand for values of Python.
_EXPANDED = re.compile(r"[{$]")
# How often each line of the script was come to: all processes run the same lines.
_times: ContextVar[Counter[str]] = ContextVar("times", default=Counter())  # noqa: B039 - one for all threads and tasks


def expanded(command: str, names: Mapping[str, Any]) -> str:
    """A command with `{expression}` and `$name` replaced by values; as it is, if one of them has none."""
    if not _EXPANDED.search(command):
        return command
    from IPython.utils.text import DollarFormatter

    try:
        return str(DollarFormatter().vformat(command, (), names))
    except Exception:  # noqa: BLE001 - IPython leaves the command alone, whatever its text raises
        return command


def system(command: str, frame: FrameType) -> None:
    """Run a command for the line of the script that a frame stands at."""
    once_on_machine(frame, lambda: _run_here(command))


def _run_here(command: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    shell = os.environ.get("SHELL") or None
    # a background program writes at any time, so its output is not read to its end
    if sys.stdout is sys.__stdout__ or command.rstrip().endswith("&"):
        subprocess.run(command, shell=True, executable=shell, check=False)
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with subprocess.Popen(
        command, shell=True, executable=shell, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 4096):
            sys.stdout.write(decoder.decode(piece))
            sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True))


def once_on_machine(frame: FrameType, work: Callable[[], object]) -> None:
    """Do some work for the line of a frame in one process of this machine; in a %%accelerate cell every process does it."""
    # It is the first process that reaches the line, so the others never wait for one that does not. They wait until the
    # work is done, and `ScriptError` is raised in them if the process that did it failed or is gone.
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks_on_machine = int(local_size) if local_size.isdigit() and "LOCAL_RANK" in os.environ else 1
    if ranks_on_machine < 2 or current_ranks() is not None:
        work()
        return
    at = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
    path = _folder() / _key(at)
    # The operating system releases the lock of a process that ends, however it ends: no process waits for ever.
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        # nothing before the first process, 0 while it works
        passed = file.read()
        if passed == "0":
            raise ScriptError(
                f"{at} is run once on each machine, and the process that ran it here did not reach its end. Its own error gives "
                "the reason; this process stops with it."
            )
        if not passed:
            file.write("0")
            file.flush()
            work()
        file.truncate(0)
        file.write(str(int(passed or 0) + 1))
        if int(passed or 0) + 1 >= ranks_on_machine:
            path.unlink(missing_ok=True)


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


def _key(at: str) -> str:
    """A name that the processes of one launch on this machine share, one for each time that they reach the line."""
    import psutil

    times = _times.get()
    times[at] += 1
    parent = psutil.Process(os.getppid())
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    parts = [at, times[at], parent.pid, parent.create_time(), *map(os.environ.get, names)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
