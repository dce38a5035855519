"""The error that the notebook raises when workers fail: the cause first, under its own type."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate_nb.config.ranks import listed, of_ranks
from accelerate_nb.errors import HangError, StoppedError, WorkerError
from accelerate_nb.events.causes import cause
from accelerate_nb.events.model import Failure
from accelerate_nb.launching.ending import Ending
from accelerate_nb.launching.exceptions import held, remade

# How many failures are told beside the one that leads.
_MOST_OTHERS = 3
# How much of a message stands beside a rank: of the one that leads, and of the others.
_WIDE, _SHORT = 300, 120


def worker_error(endings: Sequence[Ending], folder: Path | None) -> WorkerError:
    """
    The error for a run of which at least one rank failed; `folder` is where its output is kept, if it is.

    It is an instance of the class that the causing rank raised (so `except KeyError` holds), of `WorkerError`, and of
    torch's `ChildFailedError` where torch is loaded, which code written for Accelerate's launcher catches.
    """
    failures = tuple(ending.failure for ending in endings if ending.failure is not None)
    first = cause(failures)
    original = next((ending.error for ending in endings if ending.rank == first.rank), None)
    error = _as_type_of(original)
    facts = {
        "message": _message(first, failures, folder),
        "rank": first.rank,
        "failures": failures,
        "folder": None if folder is None else str(folder),
    }
    facts["__suppress_context__"] = True
    for name, value in facts.items():
        # the worker's class may be a frozen dataclass, which refuses plain assignment
        object.__setattr__(error, name, value)
    return error


def hang_error(timeout: float, stacks: str, endings: Sequence[Ending], folder: Path) -> HangError:
    """The error for a run that took longer than it may."""
    failures = tuple(ending.failure for ending in endings if ending.failure is not None)
    returned = [ending.rank for ending in endings if ending.failure is None]
    done = f" (returned already: {of_ranks(returned, listed)})" if returned else ""
    error = HangError()
    error.message = (
        f"timeout={timeout:g} was asked for, and after {timeout:g} s the run had not ended{done}. It was stopped; "
        f"the ranks were here:\n\n{stacks}\n\nAll output: {folder}"
    )
    error.rank = failures[0].rank if failures else -1
    error.failures, error.folder = failures, str(folder)
    return error


def stopped_error(last_step: int | None, endings: Sequence[Ending], folder: Path) -> StoppedError:
    """The error for a run that somebody asked to stop, where not every rank's function returned."""
    failures = tuple(ending.failure for ending in endings if ending.failure is not None)
    when = "wherever its ranks were" if last_step is None else f"after step {last_step}, on every rank"
    error = StoppedError()
    error.message = f"the run was stopped, as was asked, {when}.\n\nAll output: {folder}"
    error.rank = failures[0].rank if failures else -1
    error.failures, error.folder = failures, str(folder)
    return error


def _message(first: Failure, failures: Sequence[Failure], folder: Path | None) -> str:
    parts = [_headline(first)]
    if first.traceback:
        parts.append(first.traceback)
    if first.last_lines:
        parts.append("The last that it wrote:\n" + "\n".join(f"  {line}" for line in first.last_lines))
    others = _others(first, [one for one in failures if one is not first])
    if others:
        parts.append("\n".join(others))
    if first.advice:
        parts.append(f"What to do: {first.advice}")
    if folder is not None:
        parts.append(f"All output: {folder}")
    return "\n\n".join(parts)


def _headline(failure: Failure, width: int = _WIDE) -> str:
    if failure.exit_code is not None:
        return f"rank {failure.rank} ended with {failure.type}: {failure.message}"
    return f"rank {failure.rank} stopped with {failure.type}: {_first_line(failure.message, width)}"


def _others(first: Failure, failures: Sequence[Failure]) -> list[str]:
    """What is to be said of ranks that did not lead: a line for one of its own making, and one for all that only followed."""
    ended = [one.rank for one in failures if one.ended_by_us]
    lost = [one.rank for one in failures if one.lost_connection and not one.ended_by_us]
    own = [one for one in failures if not (one.lost_connection or one.ended_by_us)]
    same = [one.rank for one in own if _is_like(one, first)]
    others = [_headline(one, _SHORT) for one in own if not _is_like(one, first)]
    lines = [f"{of_ranks(same, listed)} stopped with the same"] if same else []
    lines += others[:_MOST_OTHERS]
    if more := others[_MOST_OTHERS:]:
        lines.append(f"and {len(more)} more failed by themselves")
    if lost:
        lines.append(f"{of_ranks(lost, listed)} lost {'its connection' if len(lost) == 1 else 'their connections'}")
    if ended:
        lines.append(f"{of_ranks(ended, listed)} {'was' if len(ended) == 1 else 'were'} ended because of it")
    return lines


def _is_like(one: Failure, other: Failure) -> bool:
    """Whether two ranks failed in the same place with the same words."""
    return (one.type, one.message, one.traceback) == (other.type, other.message, other.traceback)


def _first_line(text: str, width: int) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= width else line[:width] + " …"


def _as_type_of(original: BaseException | None) -> WorkerError:
    """A `WorkerError` that is also what the worker raised, with that exception's arguments and attributes."""
    # an exit or an interrupt of a worker ends nothing here: it is reported like any other failure
    if not isinstance(original, Exception):
        return _bare()
    kind = type(original)
    try:
        error = remade(_combined(kind), original.args, held(original))
    except TypeError:
        # a class that allows no subclass, or whose memory can't be laid out together with another's
        error = _bare()
        error.args = (str(original),)
    assert isinstance(error, WorkerError)
    return error


def _bare() -> WorkerError:
    kind = _combined(WorkerError)
    return kind.__new__(kind)


def _combined(kind: type[BaseException]) -> type[WorkerError]:
    bases: tuple[type, ...] = (WorkerError,)
    if not issubclass(kind, WorkerError):
        bases += (kind,)
    if (child_failed := _child_failed_error()) is not None and not issubclass(kind, child_failed):
        bases += (child_failed,)
    combined: type[WorkerError] = type(kind.__name__, bases, {"__module__": kind.__module__, "__init__": _no_init})
    return combined


def _no_init(*_: Any, **__: Any) -> None:
    """The error is filled in by hand: constructors of other classes want arguments of their own."""


def _child_failed_error() -> type[BaseException] | None:
    # code that catches it has imported torch
    if "torch" not in sys.modules:
        return None
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    found: type[BaseException] = ChildFailedError
    return found
