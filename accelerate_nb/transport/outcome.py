"""What a worker brings back: its function's value, or what it raised."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace
from typing import Any

from accelerate_nb.events.model import Failure
from accelerate_nb.launching.advice import advice_on
from accelerate_nb.launching.exceptions import remade
from accelerate_nb.launching.packing import read_entries, write_entries
from accelerate_nb.launching.pickling import dump_homeward, load
from accelerate_nb.launching.sources import Sources
from accelerate_nb.launching.tracebacks import frames_of, traceback_text

# What torch.distributed says on a rank whose peer has gone (gloo, NCCL, the store).
_LOST = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket (was )?closed|connectfullmesh|remote process exited"
    r"|recvvalue failed|failed to recv|peer .* (exited|gone)|connection refused|timed out waiting.*(recv|send)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Returned:
    """The function returned `value`; `modules` are the installed modules that it loaded."""

    value: Any
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Raised:
    """The function raised; `error` is the exception itself, where it could be brought along."""

    failure: Failure
    error: BaseException | None
    modules: tuple[str, ...] = ()


def write_returned(descriptor: int, value: Any, modules: tuple[str, ...]) -> None:
    """Leave a value for the kernel; raises what the pickler raises."""
    write_entries(descriptor, dump_homeward(Returned(value, modules)))


def write_raised(descriptor: int, raised: Raised) -> None:
    """Leave an exception for the kernel, with as much of it as can be pickled."""
    os.ftruncate(descriptor, 0)
    write_entries(descriptor, dump_homeward(replace(raised, error=portable(raised.error))))


def failure_of(error: BaseException, rank: int, sources: Sources) -> Failure:
    """What is to be said of an exception."""
    return Failure(
        rank=rank,
        type=type(error).__qualname__,
        message=_message(error),
        traceback=traceback_text(error, sources),
        time=time.time(),
        lost_connection=_is_lost_connection(error),
        ended_by_us=isinstance(error, KeyboardInterrupt),
        frames=frames_of(error, sources),
        advice=advice_on(error),
    )


def read_outcome(descriptor: int) -> Returned | Raised | None:
    """What a worker left; `None` where it left nothing, or not all of it."""
    entries = read_entries(descriptor)
    if not entries:
        return None
    outcome: Returned | Raised = load(entries)
    return outcome


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a person's __str__ may raise anything
        return f"(its message can't be shown: {type(error).__qualname__}.__str__ fails)"


def portable(error: BaseException | None, known: frozenset[str] | None = None) -> BaseException | None:
    """The exception; without its attributes, or with its message alone, where the rest can't travel; `None` if nothing can."""
    if error is None or _round_trips(error, known):
        return error
    for args in (error.args, (_message(error),)):
        try:
            bare = remade(type(error), args, {})
        except TypeError:
            # an exception group wants its exceptions
            continue
        if _round_trips(bare, known):
            return bare
    return None


def _round_trips(error: BaseException | None, known: frozenset[str] | None) -> bool:
    try:
        load(dump_homeward(error, known))
    except Exception:  # noqa: BLE001 - an exception's constructor may want other arguments than it keeps
        return False
    return True


def _is_lost_connection(error: BaseException) -> bool:
    return isinstance(error, (RuntimeError, OSError)) and bool(_LOST.search(_message(error)))
