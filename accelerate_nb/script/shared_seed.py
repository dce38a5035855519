"""Seeds that the processes of a launch share from their first line on, as cells of a notebook share one kernel."""

import hashlib
import os
import random
import sys
import threading
from collections.abc import Mapping, Sequence
from getopt import GetoptError, getopt

from accelerate_nb.config.environment import already_launched
from accelerate_nb.rank.import_hook import after_import

_HASHES = "PYTHONHASHSEED"
_LAUNCH = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
# Python's own; those before a colon have a value.
_OPTIONS, _LONG_OPTIONS = "bBdEhiIOPqRsStuvVxW:X:c:m:", ["check-hash-based-pycs="]


# Whether this process has begun, in all threads and tasks: a script that runs another one goes on with its own numbers.
_begun = threading.Event()


def alike(file: str) -> None:
    """Give this process the random numbers of the others of its launch, and their order of sets of texts."""
    # Python's, numpy's and torch's generators begin with a number that is new for each launch; a seed that the script
    # sets later wins. numpy and torch are seeded when they are imported: what a cell puts into the environment before
    # is read then. `numpy.random.default_rng()` and other sources of the system's entropy differ. A Python that was
    # started with hashes of its own starts once more, in place, with the same words and the hashes of all; below a
    # debugger, or anything else that could not go on, the orders of sets differ.
    if not already_launched(os.environ) or os.environ["WORLD_SIZE"] == "1" or _begun.is_set():
        return
    number = number_of(os.environ)
    can_be_set = not sys.flags.ignore_environment and _HASHES not in os.environ and sys.gettrace() is None
    if sys.flags.hash_randomization and can_be_set and can_begin_again(file, sys.orig_argv, sys.argv):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, _HASHES: str(number)})
    _begun.set()
    random.seed(number)
    after_import("numpy.random", lambda module: module.seed(number))
    after_import("torch", lambda module: module.manual_seed(number))


def number_of(environment: Mapping[str, str]) -> int:
    """A number below 2**32 that all processes of a launch share, and hardly those of another."""
    parts = [environment.get(name) for name in _LAUNCH]
    if environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]:
        # torchrun calls every run "none" and uses the same port; its folder is new each time, and of one machine
        error_file = environment.get("TORCHELASTIC_ERROR_FILE", "")
        parts.append(os.path.dirname(os.path.dirname(error_file)))
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")


def can_begin_again(file: str, words: Sequence[str], arguments: Sequence[str]) -> bool:
    """Whether these arguments started a Python that runs this file, and nothing around it."""
    try:
        options, program = getopt(list(words[1:]), _OPTIONS, _LONG_OPTIONS)
    except GetoptError:
        return False
    runs_file = program == list(arguments) and os.path.abspath(program[0]) == os.path.abspath(file)
    return runs_file and not {"-c", "-m"} & {name for name, _ in options}
