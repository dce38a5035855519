"""The error that the notebook raises when workers fail: the cause first, under its own type."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate_nb.config.rank_lists import listed, of_ranks
from accelerate_nb.errors import HangError, StoppedError, UnpicklableError, WorkerError, relink
from accelerate_nb.events.event_types import Failure, Hang, cause
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.events.terminal_lines import cleaned, plain
from accelerate_nb.failures.exception_copy import exception_values, linked_exceptions, rebuilt_exception
from accelerate_nb.failures.rank_result import RankResult

# How many failures are listed beside the one that leads.
_MOST_OTHERS = 3
# The widest line on the failure that leads, and on each of the others.
_WIDE, _SHORT = 300, 120


def worker_error(rank_results: Sequence[RankResult], folder: Path | None) -> WorkerError:
    """The error for a run of which at least one rank failed; `folder` is where its output is kept, if it is."""
    # it is of the causing rank's class (so `except KeyError` holds), a `WorkerError`, and where torch is loaded its `ChildFailedError`,
    # which code written for Accelerate's launcher catches
    failures = tuple(rank_result.failure for rank_result in rank_results if rank_result.failure is not None)
    first = cause(failures)
    original = next((rank_result.error for rank_result in rank_results if rank_result.rank == first.rank), None)
    error = _as_type_of(original)
    parts = [failure_line(first)]
    if first.traceback:
        parts.append(first.traceback)
    if first.last_lines:
        parts.append("Its last lines:\n" + "\n".join(f"  {line}" for line in first.last_lines))
    if others := other_failures(first, failures, _MOST_OTHERS):
        parts.append("\n".join(others))
    if first.advice:
        parts.append(f"What to do: {first.advice}")
    if folder is not None:
        parts.append(f"All output: {shown_path(folder)}")
    facts = {
        # whoever shows an exception shows all of its text
        "message": cleaned("\n\n".join(parts), None),
        "rank": first.rank,
        "failures": failures,
        "folder": None if folder is None else str(folder),
    }
    for name, value in facts.items():
        # the worker's class may be a frozen dataclass, which refuses plain assignment
        object.__setattr__(error, name, value)
    # what led to it leads to the error; a cycle leads back to it
    for link in [] if original is None else linked_exceptions(original):
        before, context = (error if inner is original else inner for inner in (link.__cause__, link.__context__))
        relink(error if link is original else link, before, context, link.__suppress_context__)
    return error


def hang_error(timeout: float | None, stacks: str, rank_results: Sequence[RankResult], folder: Path) -> HangError:
    """The error for a run that took longer than it may or, where that is `None`, whose ranks waited for one that had returned."""
    failures = tuple(rank_result.failure for rank_result in rank_results if rank_result.failure is not None)
    returned = [rank_result.rank for rank_result in rank_results if rank_result.failure is None]
    done = f" (returned already: {of_ranks(returned, listed)})" if returned else ""
    error = HangError()
    where, _, every_stack = stacks.partition("\n\n")
    error.hang = Hang(timeout, f"{where}{done}", every_stack, time.time())
    if timeout is None:
        what = (
            f"The run could not go on: ranks waited for others that had returned, and never come again{done}. It was stopped. Have all "
            "ranks make the same collective calls, or return together."
        )
    else:
        what = (
            f"timeout={timeout:g} was requested, and after {timeout:g} s the run had not ended{done}. It was stopped."
        )
    error.message = f"{what}\n\nThe ranks were here:\n\n{stacks}\n\nAll output: {shown_path(folder)}"
    error.rank = failures[0].rank if failures else -1
    error.failures, error.folder = failures, str(folder)
    return error


def hang_headline(hang: Hang) -> str:
    """A hang in one line: `timeout=3: the run had not ended after 3 s, and was stopped`."""
    if hang.timeout is None:
        return "ranks waited for others that had returned, and the run was stopped"
    return f"timeout={hang.timeout:g}: the run had not ended after {hang.timeout:g} s, and was stopped"


def stopped_error(stopped_at: str | None, rank_results: Sequence[RankResult], folder: Path) -> StoppedError:
    """The error for a run that somebody asked to stop, where not every rank's function returned."""
    failures = tuple(rank_result.failure for rank_result in rank_results if rank_result.failure is not None)
    when = "wherever its ranks were" if stopped_at is None else f"{stopped_at}, on every rank"
    error = StoppedError()
    error.message = f"the run was stopped, as requested, {when}.\n\nAll output: {shown_path(folder)}"
    error.rank = failures[0].rank if failures else -1
    error.failures, error.folder = failures, str(folder)
    return error


def failure_line(failure: Failure, width: int = _WIDE) -> str:
    """A failure in one line of about `width` characters at most: `rank 1 stopped with KeyError: 'lr'`."""
    ended = "ended with" if failure.exit_code is not None else "stopped with"
    message = plain(failure.message.partition("\n")[0])
    line = f"rank {failure.rank} {ended} {plain(failure.type)}{': ' if message else ''}{message}"
    return line if len(line) <= width else f"{line[:width]} …"


def other_failures(first: Failure, failures: Sequence[Failure], most: int) -> list[str]:
    """The lines on the failures beside the first: one for each rank that failed by itself, `most` at most, and one for all that followed."""
    others = [failure for failure in failures if failure is not first]
    ended = [failure.rank for failure in others if failure.ended_by_us]
    lost = [failure.rank for failure in others if failure.lost_connection and not failure.ended_by_us]
    independent = [failure for failure in others if not (failure.lost_connection or failure.ended_by_us)]
    # in the same place with the same words
    known = (first.type, first.message, first.traceback)
    same = [item.rank for item in independent if (item.type, item.message, item.traceback) == known]
    different = [failure for failure in independent if failure.rank not in same]
    lines = [f"{of_ranks(same)} stopped with the same"] if same else []
    lines += [failure_line(failure, _SHORT) for failure in different[:most]]
    if more := [failure.rank for failure in different[most:]]:
        lines.append(f"{of_ranks(more)} failed by {'itself' if len(more) == 1 else 'themselves'}, too")
    if lost:
        lines.append(f"{of_ranks(lost)} lost {'its connection' if len(lost) == 1 else 'their connections'}")
    if ended:
        lines.append(f"{of_ranks(ended)} {'was' if len(ended) == 1 else 'were'} ended because of it")
    return lines


def _as_type_of(original: BaseException | None) -> WorkerError:
    """A `WorkerError` that is also what the worker raised, with that exception's arguments and attributes."""
    bare = _combined(WorkerError)
    error: BaseException = bare.__new__(bare)
    # an exit or an interrupt of a worker ends nothing here: it is reported like any other failure
    if isinstance(original, Exception) and not isinstance(original, UnpicklableError):
        try:
            error = rebuilt_exception(_combined(type(original)), original.args, exception_values(original))
        except TypeError:
            # a class that allows no subclass, or whose memory can't be laid out together with another's
            error.args = (str(original),)
    assert isinstance(error, WorkerError)
    return error


def _combined(kind: type[BaseException]) -> type[WorkerError]:
    bases: tuple[type, ...] = (WorkerError,)
    if not issubclass(kind, WorkerError):
        bases += (kind,)
    # code that catches it has imported torch
    if "torch" in sys.modules:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if not issubclass(kind, ChildFailedError):
            bases += (ChildFailedError,)
    combined: type[WorkerError] = type(kind.__name__, bases, {"__module__": kind.__module__, "__init__": _no_init})
    return combined


def _no_init(*_: Any, **__: Any) -> None:
    """The error is filled in by hand: constructors of other classes want arguments of their own."""
