"""The processes of a launch that run the same script: they draw the same numbers, and one of each machine does its commands."""

import fcntl
import hashlib
import io
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from getopt import GetoptError, getopt
from pathlib import Path
from types import FrameType

from accelerate_nb.config.environment import already_launched
from accelerate_nb.errors import ScriptError
from accelerate_nb.rank.import_hook import after_import
from accelerate_nb.script.ranks import current_ranks

_HASHES = "PYTHONHASHSEED"
_LAUNCH = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
# Python's own; those before a colon have a value.
_OPTIONS, _LONG_OPTIONS = "bBdEhiIOPqRsStuvVxW:X:c:m:", ["check-hash-based-pycs="]
# Whether this process has begun, in all threads and tasks: a script that runs another one goes on with its own numbers.
_begun = threading.Event()
# How often each line of the script was come to: all processes run the same lines.
_times: ContextVar[Counter[str]] = ContextVar("times", default=Counter())  # noqa: B039 - one for all threads and tasks


def launch_digest(environment: Mapping[str, str], *more: object) -> bytes:
    """Bytes that all processes of a launch share, at least on one machine, and hardly those of another."""
    parts = [*more, *map(environment.get, _LAUNCH)]
    if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        # torchrun calls every run "none" and uses the same port; its folder is new each time, and of one machine
        parts.append(os.path.dirname(os.path.dirname(environment.get("TORCHELASTIC_ERROR_FILE", ""))))
    return hashlib.sha256(repr(parts).encode()).digest()


# --------------------------------------------------------------------------------------------------------- the same numbers


def alike(file: str) -> None:
    """Give this process the random numbers of the others of its launch, and their order of sets of texts."""
    # Python's, numpy's and torch's generators begin with a number that is new for each launch; a seed that the script
    # sets later wins. numpy and torch are seeded when they are imported: what a cell puts into the environment before
    # is read then. `numpy.random.default_rng()` and other sources of the system's entropy differ. A Python that was
    # started with hashes of its own starts once more, in place, with the same words and the hashes of all; below a
    # debugger, or anything else that could not go on, the orders of sets differ.
    if not already_launched(os.environ) or os.environ["WORLD_SIZE"] == "1" or _begun.is_set():
        return
    number = int.from_bytes(launch_digest(os.environ)[:4], "big")
    can_be_set = not sys.flags.ignore_environment and _HASHES not in os.environ and sys.gettrace() is None
    if sys.flags.hash_randomization and can_be_set and can_begin_again(file, sys.orig_argv, sys.argv):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, _HASHES: str(number)})
    _begun.set()
    random.seed(number)
    after_import("numpy.random", lambda module: module.seed(number))
    after_import("torch", lambda module: module.manual_seed(number))


def can_begin_again(file: str, words: Sequence[str], arguments: Sequence[str]) -> bool:
    """Whether these arguments started a Python that runs this file, and nothing around it."""
    try:
        options, program = getopt(list(words[1:]), _OPTIONS, _LONG_OPTIONS)
    except GetoptError:
        return False
    runs_file = program == list(arguments) and os.path.abspath(program[0]) == os.path.abspath(file)
    return runs_file and not {"-c", "-m"} & {name for name, _ in options}


# ------------------------------------------------------------------------------------------------------ once on each machine


def system(command: str, frame: FrameType) -> None:
    """Run a command for the line of the script that a frame stands at."""

    def work() -> None:
        sys.stdout.flush()
        shell = os.environ.get("SHELL") or None
        # a background program writes at any time, so its output is not read to its end
        if sys.stdout is sys.__stdout__ or command.rstrip().endswith("&"):
            subprocess.run(command, shell=True, executable=shell, check=False)
            return
        pipe = subprocess.PIPE
        with subprocess.Popen(command, shell=True, executable=shell, stdout=pipe, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            # a progress bar ends its lines in a carriage return
            for line in io.TextIOWrapper(process.stdout, "utf-8", "replace", newline=""):
                sys.stdout.write(line)
                sys.stdout.flush()

    once_on_machine(frame, work)


def once_on_machine(frame: FrameType, work: Callable[[], object]) -> None:
    """Do some work for the line of a frame in one process of this machine; in a %%accelerate cell every process does it."""
    # It is the first process that reaches the line, so the others never wait for one that does not. They wait until the
    # work is done, and `ScriptError` is raised in them if the process that did it failed or is gone.
    ranks_on_machine = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if "LOCAL_RANK" in os.environ else 1
    if ranks_on_machine < 2 or current_ranks() is not None:
        work()
        return
    import psutil

    at = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
    times, parent = _times.get(), psutil.Process(os.getppid())
    times[at] += 1
    # all processes of the launch on this machine have one parent, and no other launch has it, whatever its variables say
    name = launch_digest(os.environ, at, times[at], parent.pid, parent.create_time()).hex()
    path = Path(tempfile.gettempdir()) / f"accelerate-nb-{name}"
    # The operating system releases the lock of a process that ends, however it ends: no process waits for ever.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "a+", encoding="utf-8") as file:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or found.st_nlink > 1:
            raise ScriptError(f"{path} is not a file of this user alone. Set TMPDIR to a folder of your own.")
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        # nothing before the first process, "begun" while it works, and a full stop for each process that has passed
        so_far = file.read()
        if so_far == "begun":
            raise ScriptError(
                f"{at} is run once on each machine, and the process that ran it here did not reach its end. Its own error gives "
                "the reason; this process stops with it."
            )
        if not so_far:
            file.write("begun")
            file.flush()
            work()
        file.write(".")
        if so_far.count(".") + 1 >= ranks_on_machine:
            path.unlink(missing_ok=True)
