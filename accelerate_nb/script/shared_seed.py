"""Seeds that the processes of a launch share from their first line on, as cells of a notebook share one kernel."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NoReturn

from accelerate_nb.config.environment import already_launched
from accelerate_nb.rank.import_hook import after_import

_HASHES = "PYTHONHASHSEED"
_LAUNCH = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
# Python's options with a value of their own, and those that run something else than a file.
_WITH_VALUE, _NO_FILE = "WX", "cm"
_LONG_WITH_VALUE = "--check-hash-based-pycs"


@dataclass
class _FirstRun:
    """Whether this process has begun: a script that runs another one goes on with its own numbers."""

    has_begun: bool = field(default=False)


_once: ContextVar[_FirstRun] = ContextVar("begun", default=_FirstRun())  # noqa: B039 - one for all threads and tasks


def alike(file: str) -> None:
    """
    Give this process the random numbers of the others of its launch, and their order of sets of texts.

    Python's, numpy's and torch's generators begin with a number that is new for each launch; a seed that the script sets
    later wins. numpy and torch are seeded when they are imported, which stays where the script does it: what a cell puts into
    the environment before is read then. `numpy.random.default_rng()` and other sources of the system's entropy differ.

    A Python that was started with hashes of its own starts once more, in place, with the same words and with the hashes of
    all. Where it runs below a debugger, or anything else that could not go on, the orders of sets differ.

    A process that was not launched beside others is left alone.

    >>> alike("train.py")
    """
    if not already_launched(os.environ) or os.environ["WORLD_SIZE"] == "1" or _once.get().has_begun:
        return
    number = number_of(os.environ)
    if _has_random_hashes() and can_begin_again(file, sys.orig_argv, sys.argv):
        _begin_again(number)
    _once.get().has_begun = True
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
    options, program = words[1 : -len(arguments)], words[-len(arguments) :]
    if list(program) != list(arguments) or os.path.abspath(program[0]) != os.path.abspath(file):
        return False
    waiting = iter(options)
    for word in waiting:
        if word == _LONG_WITH_VALUE:
            next(waiting, None)
        elif not word.startswith("-") or word == "-":
            return False
        elif not word.startswith("--"):
            chars = word[1:]
            first = next((position for position, char in enumerate(chars) if char in _WITH_VALUE + _NO_FILE), None)
            if first is None:
                continue
            if chars[first] in _NO_FILE:
                return False
            if first == len(chars) - 1:
                next(waiting, None)
    return True


def _has_random_hashes() -> bool:
    can_be_set = not sys.flags.ignore_environment and _HASHES not in os.environ
    # on Windows `exec` starts another process, and who waits for this one would not know it
    return bool(sys.flags.hash_randomization) and can_be_set and os.name != "nt" and sys.gettrace() is None


def _begin_again(number: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, _HASHES: str(number)})
