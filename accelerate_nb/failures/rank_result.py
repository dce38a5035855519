"""The result of a rank: its value or its failure."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate_nb.config.rank_lists import listed, of_ranks
from accelerate_nb.events.event_types import Failure
from accelerate_nb.failures.hints import advice_on_death

_SIGNALS = {item.value: item.name for item in signal.Signals}
_REASONS = {
    "SIGKILL": "it was killed from outside; Linux does that to a process when memory runs out",
    **dict.fromkeys(("SIGSEGV", "SIGBUS"), "it touched memory that is not its own: a fault in compiled code"),
}


@dataclass(frozen=True, slots=True)
class RankResult:
    """A rank's end: its function's `value` (`left_out`: why it is `None`), or a `failure` with the exception where it came along."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    error: BaseException | None = None
    modules: tuple[str, ...] = ()
    left_out: str = ""


def left_out_text(name: str, left_out: Mapping[int, str], instead: str = "None stands in its place") -> str:
    """A sentence on values that could not be brought along, with the reason of each rank; empty where all were."""
    found = {rank: reason for rank, reason in left_out.items() if reason}
    if not found:
        return ""
    return (
        f"The result of {name} on {of_ranks(list(found), listed)} stays in its process: {next(iter(found.values()))}. {instead}. "
        "Return what can be pickled, or save it to a file."
    )


def death_failure(
    rank: int, code: int, *, last_lines: Sequence[str], time: float, ended_by_us: bool, crash: str = ""
) -> Failure:
    """A failure for a process that ended without reporting why; `crash` is where it was, as far as it is known."""
    name = "" if code >= 0 else _SIGNALS.get(-code, f"signal {-code}")
    if ended_by_us:
        message = "it was ended with the others"
    elif name:
        message = _REASONS.get(name, "a signal ended it")
    else:
        message = "it ended before its function returned" if code == 0 else "it ended itself"
    return Failure(
        rank=rank,
        type=name or f"exit code {code}",
        message=message,
        traceback=crash,
        time=time,
        exit_code=code,
        last_lines=tuple(last_lines),
        ended_by_us=ended_by_us,
        advice="" if ended_by_us else advice_on_death(name, last_lines),
    )


def node_loss_failure(rank: int, *, last_lines: Sequence[str], time: float) -> Failure:
    """A failure for a process of which nothing is known but that its node was lost."""
    message = "it was lost with its node"
    return Failure(rank, "NodeLost", message, traceback="", time=time, last_lines=tuple(last_lines))
