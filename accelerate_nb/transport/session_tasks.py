"""A session's tasks and the workers' replies: the plain values that travel between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from accelerate_nb.events.event_types import Failure

# The variables that the first cell finds.
NAMESPACE = """
from accelerate_nb import Accelerator
accelerator = Accelerator()
rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
"""


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
    """A task with what the worker has to know first; without a task the request only wants a reply."""

    task: Task | None
    # the names of all that the notebook's `__main__` has
    known: frozenset[str] = frozenset()
    # cells of the notebook that the worker may not know yet
    lines: Mapping[str, list[str]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    # the functions and classes of the notebook's `__main__` that travel along
    names: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskReply:
    """The reply of one rank to a task; `error` is the exception behind `failure`, as far as it can travel."""

    seconds: float
    # the MIME bundle of a cell's last expression, with its metadata
    result: dict[str, Any] | None = None
    # what was pulled or returned, by name
    value: Mapping[str, Any] | None = None
    failure: Failure | None = None
    error: BaseException | None = None
    # how many collectives each process group has begun, and whether torch's communication raised
    groups: Mapping[str, int] = field(default_factory=dict)
    in_collective: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # the person's variables that there are now
    names: tuple[str, ...] = ()
    # why a returned value is `None` that could not be brought along
    left_out: str = ""
