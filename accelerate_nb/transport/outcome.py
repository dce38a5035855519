"""A worker's outcome: its function's value, or what it raised."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace
from typing import Any

from accelerate_nb.events.model import Failure
from accelerate_nb.failures.exception_copy import message_of
from accelerate_nb.failures.hints import advice_on
from accelerate_nb.failures.traceback_format import frames_of, traceback_text
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.exception_chain import portable
from accelerate_nb.transport.memory_file import read_entries, write_entries
from accelerate_nb.transport.serializer import dump_homeward, load

# The messages of torch.distributed on a rank whose peer has gone (gloo, NCCL, the store).
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
    error = None if raised.error is None else portable(raised.error)
    write_entries(descriptor, dump_homeward(replace(raised, error=error)))


def failure_of(error: BaseException, rank: int, sources: CellSources) -> Failure:
    """The `Failure` that reports an exception."""
    return Failure(
        rank=rank,
        type=type(error).__qualname__,
        message=message_of(error),
        traceback=traceback_text(error, sources),
        time=time.time(),
        lost_connection=_is_lost_connection(error),
        ended_by_us=isinstance(error, KeyboardInterrupt),
        frames=frames_of(error, sources),
        advice=advice_on(error),
    )


def read_outcome(descriptor: int) -> Returned | Raised | None:
    """The outcome that a worker left; `None` where it left nothing, or not all of it."""
    entries = read_entries(descriptor)
    if not entries:
        return None
    outcome: Returned | Raised = load(entries)
    return outcome


def outcome_of(rank: int, descriptor: int) -> Returned | Raised | Failure | None:
    """The outcome that a rank left; a `Failure` where it can't be unpickled, `None` where there is none."""
    try:
        return read_outcome(descriptor)
    except Exception as error:  # noqa: BLE001 - unpickling runs anybody's code
        return unpickling_failure(rank, "result", error)


def unpickling_failure(rank: int, what: str, error: BaseException) -> Failure:
    """The `Failure` of a rank whose result or reply raised an error when this process unpickled it."""
    message = f"its {what} can't be unpickled in this process: {error}"
    return Failure(rank, type(error).__qualname__, message, traceback="", time=time.time())


def _is_lost_connection(error: BaseException) -> bool:
    return isinstance(error, (RuntimeError, OSError)) and bool(_LOST.search(message_of(error)))
