"""A session's tasks and the workers' replies: the plain values that travel between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from accelerate_nb.events.event_types import Failure


@dataclass(frozen=True, slots=True)
class RunCell:
    """Run the text of a cell, in the worker's `__main__`; its lines are known under `filename`, its number is that of `In [N]`."""

    source: str
    filename: str
    number: int


@dataclass(frozen=True, slots=True)
class PushNames:
    """Give these names these values."""

    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PullNames:
    """Bring the values of these names."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallFunction:
    """Call a function, and bring what it returns."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


# The name under which a called function's value is returned.
RETURNED = "the returned value"

Task: TypeAlias = RunCell | PushNames | PullNames | CallFunction


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """
    A task on its way, with what the worker has to know first.

    `lines` and `numbers` are cells of the notebook that it may not know yet, `names` the functions and classes of the
    notebook's `__main__` that travel along; `known` are the names of all that it has. Without a task the request only
    wants a reply.
    """

    task: Task | None
    known: frozenset[str] = frozenset()
    lines: Mapping[str, list[str]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskReply:
    """
    The reply of one rank to a task.

    `result` is the MIME bundle of a cell's last expression with its `metadata`, `value` holds, by name, what was pulled or returned; `error` is the
    exception behind `failure`, as far as it can travel. `groups` counts the collectives that each process group has begun, and
    `in_collective` is whether torch's communication raised; `names` are the person's variables that there are now. `left_out` says why a
    returned value is `None` that could not be brought along.
    """

    seconds: float
    result: dict[str, Any] | None = None
    value: Mapping[str, Any] | None = None
    failure: Failure | None = None
    error: BaseException | None = None
    groups: Mapping[str, int] = field(default_factory=dict)
    in_collective: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    left_out: str = ""
