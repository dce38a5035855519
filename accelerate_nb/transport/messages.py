"""The messages between kernel, supervisor and workers: one tagged union of frozen values, encoded as checked JSON."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from typing import Any, ClassVar, Literal, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

from accelerate_nb.errors import ProtocolError
from accelerate_nb.rank.stop_request import StopPoint, TrainingPosition
from accelerate_nb.transport.worker_spec import LocalWorker


@dataclass(frozen=True, slots=True)
class Message:
    """
    The base of every message. Another one is a frozen dataclass below it, and a line in `TAGS`.

    Its fields are numbers, texts, truth values, `None`, tuples of these, mappings by name, or frozen dataclasses of these.
    `carries` is the number of descriptors that come with it; `None` stands for any.
    """

    carries: ClassVar[int | None] = 0


# ------------------------------------------------------------------------------------------------- kernel to supervisor


@dataclass(frozen=True, slots=True)
class OpenGroup(Message):
    """Workers of a run will follow; the descriptor is the socket that reports on them, and closing it ends them."""

    carries: ClassVar[int | None] = 1
    run: str


@dataclass(frozen=True, slots=True)
class ForkSupervisor(Message):
    """Fork a supervisor like this one; the descriptor is its end of the socket over which another process uses it."""

    carries: ClassVar[int | None] = 1


@dataclass(frozen=True, slots=True)
class ForkWorker(Message):
    """Fork one process that is these workers; the descriptors are theirs, in their order (`descriptors_of`)."""

    carries: ClassVar[int | None] = None
    run: str
    workers: tuple[LocalWorker, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the process."""
        return tuple(worker.rank for worker in self.workers)


@dataclass(frozen=True, slots=True)
class ImportModules(Message):
    """Import these modules when nothing runs, and nothing has for `idle_for` seconds."""

    names: tuple[str, ...]
    idle_for: float = 0.0


@dataclass(frozen=True, slots=True)
class SignalRanks(Message):
    """Send a signal to the workers that have one of these ranks."""

    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KillGroup(Message):
    """Kill every worker of the group, and what it started."""


# ------------------------------------------------------------------------------------------------- supervisor to kernel


@dataclass(frozen=True, slots=True)
class SupervisorStarted(Message):
    """The first message of a forked supervisor."""

    pid: int


@dataclass(frozen=True, slots=True)
class WorkerStarted(Message):
    """A worker with these ranks was forked."""

    ranks: tuple[int, ...]
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerExited(Message):
    """The worker with these ranks has ended; a negative code is the signal that ended it."""

    ranks: tuple[int, ...]
    code: int


# ---------------------------------------------------------------------------------------------------- to a new process


@dataclass(frozen=True, slots=True)
class BeginWorker(Message):
    """Be the process of these workers; the descriptors are theirs, in their order (`descriptors_of`)."""

    carries: ClassVar[int | None] = None
    workers: tuple[LocalWorker, ...]


# ----------------------------------------------------------------------------------------------------- kernel to worker


@dataclass(frozen=True, slots=True)
class HoldAtBoundary(Message):
    """Wait at the end of the step, and write a `HoldReply` into the pipe."""

    carries: ClassVar[int | None] = 1


@dataclass(frozen=True, slots=True)
class StopAt(Message):
    """Go on to a point, and stop there."""

    point: StopPoint


@dataclass(frozen=True, slots=True)
class QueryCollectives(Message):
    """Write a `CollectivesReply` into the pipe."""

    carries: ClassVar[int | None] = 1


@dataclass(frozen=True, slots=True)
class LeaveGroup(Message):
    """End the process: every rank has returned."""


@dataclass(frozen=True, slots=True)
class BeginTask(Message):
    """
    Do a session's task; the descriptors are the files of its request and of its reply.

    `renewal` is the name under which the process groups are rebuilt first, `others` are the other ranks' process numbers.
    """

    carries: ClassVar[int | None] = 2
    number: int
    renewal: str | None
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InterruptTask(Message):
    """Interrupt the task of this number, if it is the one that runs."""

    number: int
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseSession(Message):
    """End the session after the tasks that have come."""


# --------------------------------------------------------------------------------------- worker to kernel, into a pipe


@dataclass(frozen=True, slots=True)
class HoldReply(Message):
    """A rank's position when it was asked to hold; `None` where it comes to no boundary."""

    position: TrainingPosition | None


@dataclass(frozen=True, slots=True)
class CollectivesReply(Message):
    """The collectives that are under way in a rank by torch's flight recorder, oldest first."""

    entries: tuple[Mapping[str, Any], ...]


# ------------------------------------------------------------------------------------------ attached process to run host


@dataclass(frozen=True, slots=True)
class StopRun(Message):
    """Request the end of the run (`Run.request_stop`); the reply is a `LiveState`."""

    how: Literal["finish", "interrupt", "kill"]


@dataclass(frozen=True, slots=True)
class QueryStacks(Message):
    """Reply with a `StacksReply`."""


@dataclass(frozen=True, slots=True)
class QueryLiveState(Message):
    """Reply with a `LiveState`."""


# ------------------------------------------------------------------------------------------ run host to attached process


@dataclass(frozen=True, slots=True)
class StacksReply(Message):
    """The position of every rank, as a person reads it."""

    text: str


@dataclass(frozen=True, slots=True)
class LiveState(Message):
    """The events that make up the part of a run's state that its folder does not keep, and whether the run is over."""

    done: bool
    events: tuple[Mapping[str, Any], ...]


# The `type` tag of each message. A tag stays what it is when a class is renamed.
TAGS: Mapping[str, type[Message]] = {
    "open_group": OpenGroup,
    "fork_supervisor": ForkSupervisor,
    "fork_worker": ForkWorker,
    "import_modules": ImportModules,
    "signal_ranks": SignalRanks,
    "kill_group": KillGroup,
    "supervisor_started": SupervisorStarted,
    "worker_started": WorkerStarted,
    "worker_exited": WorkerExited,
    "begin_worker": BeginWorker,
    "hold_at_boundary": HoldAtBoundary,
    "stop_at": StopAt,
    "query_collectives": QueryCollectives,
    "leave_group": LeaveGroup,
    "begin_task": BeginTask,
    "interrupt_task": InterruptTask,
    "close_session": CloseSession,
    "hold_reply": HoldReply,
    "collectives_reply": CollectivesReply,
    "stop_run": StopRun,
    "query_stacks": QueryStacks,
    "query_live_state": QueryLiveState,
    "stacks_reply": StacksReply,
    "live_state": LiveState,
}
_TAG_OF = {message_class: tag for tag, message_class in TAGS.items()}


def encode(message: Message) -> bytes:
    """A message as one line of ASCII: its tag under `type`, then its fields."""
    return json.dumps({"type": _TAG_OF[type(message)], **_plain_fields(message)}).encode("ascii")


def decode(body: bytes) -> Message:
    """The message that `encode` wrote; raises `ProtocolError` for anything else."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("malformed", f"a message is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ProtocolError("malformed", f"a message is no object, but {type(values).__name__}")
    tag = values.pop("type", None)
    message_class = TAGS.get(tag) if isinstance(tag, str) else None
    if message_class is None:
        raise ProtocolError("unknown", f"a message is of type {str(tag)[:80]!r}; known types are {', '.join(TAGS)}")
    try:
        return cast("Message", _checked_fields(message_class, values))
    except _MismatchError as error:
        raise ProtocolError("malformed", f"a message of type {tag!r} was refused: {error}") from None


# ------------------------------------------------------------------------------------------------------ plain and back


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return _plain_fields(value) if hasattr(value, "__dataclass_fields__") else value


def _plain_fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


class _MismatchError(Exception):
    """A value is not of its field's type."""


_Check: TypeAlias = Callable[[Any], Any]


def _checked_fields(value_class: type[Any], values: Any) -> Any:
    """A frozen dataclass out of its fields, none of which is missing, unknown or of another type."""
    if not isinstance(values, dict):
        raise _MismatchError(f"{value_class.__name__} is no object, but {type(values).__name__}")
    checks, required = _field_checks(cast("Hashable", value_class))
    if unknown := values.keys() - checks.keys():
        raise _MismatchError(f"it has unknown fields: {', '.join(sorted(unknown))[:200]}")
    if missing := required - values.keys():
        raise _MismatchError(f"it lacks {', '.join(sorted(missing))}")
    checked = {}
    for name, value in values.items():
        try:
            checked[name] = checks[name](value)
        except _MismatchError as error:
            raise _MismatchError(f"{name}: {error}") from None
    return value_class(**checked)


@cache
def _field_checks(value_class: Any) -> tuple[dict[str, _Check], frozenset[str]]:
    """The check of each field by its annotation, and the fields that have no default."""
    hints = get_type_hints(value_class)
    own = fields(value_class)
    required = (field.name for field in own if field.default is MISSING and field.default_factory is MISSING)
    return {field.name: _check_of(hints[field.name]) for field in own}, frozenset(required)


def _check_of(hint: Any) -> _Check:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin in {Union, types.UnionType}:
        return partial(_check_union, [_check_of(argument) for argument in arguments])
    if origin is Literal:
        return partial(_check_literal, arguments)
    if origin is tuple:
        return partial(_check_items, _check_of(arguments[0]))
    if origin is not None:  # a mapping by name
        return partial(_check_mapping, _check_of(arguments[1]))
    if hasattr(hint, "__dataclass_fields__"):
        return partial(_checked_fields, hint)
    if hasattr(hint, "_fields"):
        return partial(_check_named_tuple, hint)
    return partial(_check_plain, hint)


def _check_plain(wanted: type, value: Any) -> Any:
    # a truth value is an int to Python, and an int is written where a float is meant
    if type(value) is wanted or (wanted is float and type(value) is int):
        return value
    raise _MismatchError(f"{wanted.__name__} was expected, not {type(value).__name__}")


def _check_union(checks: list[_Check], value: Any) -> Any:
    *others, last = checks
    for check in others:
        with suppress(_MismatchError):
            return check(value)
    return last(value)


def _check_literal(choices: tuple[Any, ...], value: Any) -> Any:
    if isinstance(value, (str, int)) and value in choices:
        return value
    raise _MismatchError(f"one of {', '.join(map(repr, choices))} was expected, not {str(value)[:80]!r}")


def _check_items(check: _Check, value: Any) -> tuple[Any, ...]:
    return tuple(map(check, _check_plain(list, value)))


def _check_mapping(check: _Check, value: Any) -> dict[str, Any]:
    return {name: check(item) for name, item in _check_plain(dict, value).items()}


def _check_named_tuple(tuple_class: Any, value: Any) -> Any:
    checks = [_check_of(hint) for hint in get_type_hints(tuple_class).values()]
    items = _check_plain(list, value)
    if len(items) != len(checks):
        raise _MismatchError(f"{len(checks)} items were expected, not {len(items)}")
    return tuple_class(*(check(item) for check, item in zip(checks, items, strict=True)))
