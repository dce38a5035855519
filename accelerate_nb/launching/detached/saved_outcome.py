"""The outcome of a detached run in its folder: each rank's result as its worker wrote it, and the run's error."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate_nb import errors
from accelerate_nb.errors import AccelerateNbError, HangError, LaunchError, StoppedError, WorkerError
from accelerate_nb.events.run_folder import RunRecorder
from accelerate_nb.events.run_state import RunState
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.failures.worker_error import worker_error
from accelerate_nb.launching.group_runner import Outcomes
from accelerate_nb.transport.outcome import read_result

_ERROR = "error.json"
_AT_ONCE = 1 << 20


class SavedOutcomes(Outcomes):
    """Results stay as their workers wrote them, in the run's folder, for other processes to unpickle."""

    def __init__(self, view: RunState, record: RunRecorder) -> None:
        self._view, self._record = view, record
        # the outcomes that the folder could not take, in memory
        self._unsaved: dict[int, int] = {}

    def read(self, rank: int, descriptor: int) -> RankResult | None:
        """Copy a rank's result; returns what is known of it without unpickling it."""
        glance = self._view.rank(rank)
        try:
            has_left_one = _save_result(self._record.folder, rank, descriptor)
        except OSError as error:
            self._record.trouble = error
            self._unsaved[rank] = os.dup(descriptor)
            has_left_one = True
        if has_left_one and glance.failure is not None:
            return RankResult(rank, failure=glance.failure)
        return RankResult(rank) if has_left_one and glance.state == "finished" else None

    def save(self, error: BaseException | None) -> bool:
        try:
            for rank, descriptor in list(self._unsaved.items()):
                _save_result(self._record.folder, rank, descriptor)
                os.close(self._unsaved.pop(rank))
            beside = self._record.folder / f"{_ERROR}.new"
            facts = (
                {"type": error_kind(error), "message": str(error), "rank": getattr(error, "rank", -1)}
                if error is not None
                else None
            )
            beside.write_text(json.dumps(facts), encoding="utf-8")
            os.replace(beside, self._record.folder / _ERROR)
        except OSError:
            return False
        return True

    def facts(self) -> dict[str, Any]:
        """The run's progress, and its newest metrics."""
        glances = self._view.glances()
        bars = [bar for glance in glances for bar in glance.progress.values() if bar.total]
        open_bars = [bar for bar in bars if not bar.closed] or bars
        metrics = {name: metric.value for glance in reversed(glances) for name, metric in glance.metrics.items()}
        bar = open_bars[0] if open_bars else None
        return {"progress": None if bar is None else [bar.label, bar.done, bar.total], "metrics": metrics}


def _save_result(folder: Path, rank: int, descriptor: int) -> bool:
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


def read_error(folder: Path, rank_results: Sequence[RankResult], view: RunState) -> BaseException | None:
    """The exception of the run's end, of the class that the worker raised where that can be found here."""
    try:
        facts = json.loads((folder / _ERROR).read_text(encoding="utf-8"))
        if facts is not None:
            facts = {"type": str(facts["type"]), "message": plain(str(facts["message"])), "rank": int(facts["rank"])}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return LaunchError(f"The run ended, and its outcome could not be kept in {folder}: see the logs there.")
    if facts is None:
        return None
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


def saved_result(folder: Path, rank: int, view: RunState) -> RankResult:
    """A rank's result, as far as this process can unpickle it; of one that left none, its failure."""
    failure = view.rank(rank).failure
    try:
        descriptor = os.open(folder / f"rank_{rank}.result", os.O_RDONLY)
    except OSError:
        return RankResult(rank, failure=failure)
    try:
        return read_result(descriptor) or RankResult(rank, failure=failure)
    except (AttributeError, ImportError) as error:
        earlier = f"an earlier version of this package wrote it, and that version can read it ({error})"
        return RankResult(rank, failure=failure, left_out=earlier)
    finally:
        os.close(descriptor)


def error_kind(error: BaseException) -> str:
    """The name of an error's class, or of the first one below it that is this package's."""
    return next((base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__), "LaunchError")


def error_class(kind: str) -> type[AccelerateNbError]:
    """This package's error of a name, `LaunchError` where it has none."""
    found = getattr(errors, kind, LaunchError)
    return found if isinstance(found, type) and issubclass(found, AccelerateNbError) else LaunchError
