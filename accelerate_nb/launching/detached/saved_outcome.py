"""The outcome of a detached run in its folder: each rank's result as its worker wrote it, and the run's error."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate_nb import errors
from accelerate_nb.errors import AccelerateNbError, HangError, LaunchError, StoppedError, WorkerError
from accelerate_nb.events.run_state import RunState
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.failures.worker_error import worker_error
from accelerate_nb.transport.outcome import read_outcome

_ERROR = "error.json"
_AT_ONCE = 1 << 20


def save_result(folder: Path, rank: int, descriptor: int) -> bool:
    """Copy the outcome that a worker left into the run's folder, as it is; whether it left one."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return False
    beside = folder / f"rank_{rank}.result.new"
    offset = 0
    with beside.open("wb") as file:
        while offset < size and (data := os.pread(descriptor, _AT_ONCE, offset)):
            file.write(data)
            offset += len(data)
    os.replace(beside, folder / f"rank_{rank}.result")
    return True


def save_error(folder: Path, error: BaseException | None) -> None:
    """Write what `wait` raises into the run's folder."""
    beside = folder / f"{_ERROR}.new"
    beside.write_text(json.dumps(None if error is None else _facts(error)), encoding="utf-8")
    os.replace(beside, folder / _ERROR)


def read_results(folder: Path, view: RunState) -> tuple[RankResult, ...]:
    """Each rank's result, as far as this process can unpickle it; of a rank that left none, its failure."""
    return tuple(_result(folder, rank, view) for rank in view.ranks)


def read_error(folder: Path, rank_results: Sequence[RankResult], view: RunState) -> BaseException | None:
    """The exception of the run's end, of the class that the worker raised where that can be found here."""
    try:
        facts = json.loads((folder / _ERROR).read_text(encoding="utf-8"))
        if facts is not None:
            facts = {"type": str(facts["type"]), "message": plain(str(facts["message"])), "rank": int(facts["rank"])}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return LaunchError(f"The run ended, and its outcome could not be kept in {folder}: see the logs there.")
    return None if facts is None else _error(facts, rank_results, view, folder)


def _result(folder: Path, rank: int, view: RunState) -> RankResult:
    failure = view.rank(rank).failure
    try:
        descriptor = os.open(folder / f"rank_{rank}.result", os.O_RDONLY)
    except OSError:
        return RankResult(rank, failure=failure)
    try:
        outcome = read_outcome(descriptor)
    finally:
        os.close(descriptor)
    return RankResult(rank, failure=failure) if outcome is None else outcome.rank_result(rank)


def error_kind(error: BaseException) -> str:
    """The name of an error's class, or of the first one below it that is this package's."""
    return next((base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__), "LaunchError")


def error_class(kind: str) -> type[AccelerateNbError]:
    """This package's error of a name, `LaunchError` where it has none."""
    found = getattr(errors, kind, LaunchError)
    return found if isinstance(found, type) and issubclass(found, AccelerateNbError) else LaunchError


def _facts(error: BaseException) -> dict[str, Any]:
    return {"type": error_kind(error), "message": str(error), "rank": getattr(error, "rank", -1)}


def _error(facts: dict[str, Any], rank_results: Sequence[RankResult], view: RunState, folder: Path) -> BaseException:
    kind = error_class(facts["type"])
    if not issubclass(kind, WorkerError):
        return kind(facts["message"])
    if issubclass(kind, (HangError, StoppedError)) or not view.failures:
        error = kind()
    else:
        # a rank whose result can't be unpickled here did not fail by that
        failed = {failure.rank: failure for failure in view.failures}
        error = worker_error(
            [RankResult(item.rank, failure=failed.get(item.rank), error=item.error) for item in rank_results], folder
        )
    values = {"message": facts["message"], "rank": facts["rank"], "failures": view.failures, "folder": str(folder)}
    if isinstance(error, HangError):
        values["hang"] = view.hang
    for name, value in values.items():
        # the worker's class may be a frozen dataclass, which refuses plain assignment
        object.__setattr__(error, name, value)
    return error
