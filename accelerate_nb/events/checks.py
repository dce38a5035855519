"""One check of a self-test, as it travels from a worker: a display of a type of its own."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from accelerate_nb.events.model import Display, Event

Progress: TypeAlias = Literal["waiting", "running", "passed", "failed", "left out"]

_TYPE = "application/vnd.accelerate-nb.check+json"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check: its name, its progress, its finding; `advice` is what to do about a failure."""

    name: str
    title: str
    state: Progress
    text: str = ""
    advice: str = ""


def to_display(check: CheckResult, rank: int) -> Display:
    """The check as an event."""
    return Display(rank=rank, data={_TYPE: asdict(check)}, metadata={}, time=time.time())


def from_display(event: Event) -> CheckResult | None:
    """The check that an event is, if it is one."""
    if not isinstance(event, Display) or _TYPE not in event.data:
        return None
    return CheckResult(**event.data[_TYPE])
