"""A worker's outcome, which is its rank's result in a file: its function's value, or what it raised."""

import os
import pickle
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate_nb.events.event_types import Failure
from accelerate_nb.failures.exception_copy import message_of
from accelerate_nb.failures.hints import advice_on
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.failures.traceback_format import frames_of, traceback_text
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.exception_chain import portable
from accelerate_nb.transport.memory_file import Bytes, read_entries, write_entries
from accelerate_nb.transport.serializer import dump_homeward, load, unpicklable_part
from accelerate_nb.transport.sharded_results import whole_tensors

# The messages of torch.distributed on a rank whose peer has gone (gloo, NCCL, the store).
_LOST = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket (was )?closed|connectfullmesh|remote process exited"
    r"|recvvalue failed|failed to recv|peer .* (exited|gone)|connection refused|timed out waiting.*(recv|send)",
    re.IGNORECASE,
)


# A message may hold somebody's whole data set; the exception itself goes whole.
_LONGEST_MESSAGE = 1 << 20


def write_result(descriptor: int, result: RankResult, *, is_wanted: bool = True) -> None:
    """Leave a rank's result for the kernel: as much as can be pickled of its value or error, and what was left out."""
    # all ranks of a process group call it: one whose value nobody receives writes none, but helps to put sharded weights together
    entries: list[Bytes] = []
    if result.failure is None:
        entries, left_out = pack_result(result.value, is_wanted=is_wanted)
        result = replace(result, value=None, left_out=left_out)
    elif result.error is not None:
        result = replace(result, error=portable(result.error))
    os.ftruncate(descriptor, 0)
    write_entries(descriptor, [pickle.dumps(result), *entries])


def pack_result(value: Any, known: frozenset[str] | None = None, *, is_wanted: bool = True) -> tuple[list[Bytes], str]:
    """A returned value as bytes; or `None` as bytes, and the part of the value that can't travel. Nothing where none is wanted."""
    whole = whole_tensors(value)
    if not is_wanted:
        return [], ""
    try:
        return dump_homeward(value, known, whole=whole), ""
    except Exception as error:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
        return dump_homeward(None), why_left_out(value, error, known, whole)


def why_left_out(
    value: Any, error: Exception, known: frozenset[str] | None = None, whole: Callable[[Any], Any] | None = None
) -> str:
    """The part of a returned value that can't travel, and the `error` of an attempt to pickle it."""
    part = unpicklable_part(value, "result", partial(dump_homeward, known=known, whole=whole))
    return f"{part} ({type(error).__name__}: {error})"


def failure_of(error: BaseException, rank: int, sources: CellSources) -> Failure:
    """The `Failure` that reports an exception."""
    message = message_of(error)
    if (more := len(message) - _LONGEST_MESSAGE) > 0:
        message = f"{message[:_LONGEST_MESSAGE]} … ({more:,} more characters)"
    return Failure(
        rank=rank,
        type=type(error).__qualname__,
        message=message,
        traceback=traceback_text(error, sources),
        time=time.time(),
        lost_connection=isinstance(error, (RuntimeError, OSError)) and bool(_LOST.search(message)),
        ended_by_us=isinstance(error, KeyboardInterrupt),
        frames=frames_of(error, sources),
        advice=advice_on(error),
    )


def read_result(descriptor: int) -> RankResult | None:
    """The result that a worker left; `None` where it left nothing, or not all of it. A value that can't be unpickled is left out."""
    entries = read_entries(descriptor)
    if not entries:
        return None
    head, *value = entries
    result: RankResult = pickle.loads(head)
    if not value:
        return result
    try:
        return replace(result, value=load(value))
    except Exception as error:  # noqa: BLE001 - unpickling runs anybody's code
        return replace(
            result,
            left_out=f"it can't be unpickled in this process ({type(error).__name__}: {error}): run the cell that defines what is missing",
        )


def unpickling_failure(rank: int, what: str, error: BaseException) -> Failure:
    """The `Failure` of a rank whose result or reply raised an error when this process unpickled it."""
    message = f"its {what} can't be unpickled in this process: {error}"
    return Failure(rank, type(error).__qualname__, message, traceback="", time=time.time())
