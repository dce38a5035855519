"""What can happen in a run: one frozen class for each kind of event, and its line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple, TypeAlias

from accelerate_nb.errors import ConfigurationError

Stream: TypeAlias = Literal["stdout", "stderr"]
State: TypeAlias = Literal["starting", "running", "stopping", "finished", "failed", "stopped"]

# A view of an ipywidgets widget in a MIME bundle, whose model is in the process that showed it.
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# The states after which nothing more happens, and the others.
OVER: frozenset[State] = frozenset({"finished", "failed", "stopped"})
GOING_ON: frozenset[State] = frozenset({"starting", "running", "stopping"})


@dataclass(frozen=True, slots=True)
class LogLine:
    """A rank wrote a line; `open` says that it has not ended yet (a progress bar) and the next one replaces it."""

    rank: int
    stream: Stream
    text: str
    time: float
    open: bool = False


@dataclass(frozen=True, slots=True)
class Metric:
    """A rank logged a number under a name; `step` is the caller's own count."""

    rank: int
    name: str
    value: float
    step: int | None
    time: float


@dataclass(frozen=True, slots=True)
class Progress:
    """
    A rank has done `done` of `total` units of something.

    `rate` is in units a second, `closed` says that the bar has ended and will not move again. `bar` is the bar's own name
    among those of its rank, without it the label is: an event replaces the last one of the same bar, whatever it was
    labelled then. `note` is what its owner adds at the moment, such as a loss.
    """

    rank: int
    label: str
    done: float
    total: float | None
    time: float
    rate: float | None = None
    unit: str = "it"
    closed: bool = False
    bar: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Display:
    """
    A rank showed something rich: a MIME bundle, as IPython's `display` makes it.

    `name` is what it goes by among those of its rank (IPython's `display_id`), where it may be shown anew: with `update` it
    takes the place of what was shown under that name.
    """

    rank: int
    data: dict[str, Any]
    metadata: dict[str, Any]
    time: float
    name: str = ""
    update: bool = False


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """How busy a device is: `utilisation` in percent, memory in bytes."""

    rank: int
    device: str
    utilisation: float | None
    memory_used: int | None
    memory_total: int | None
    time: float


@dataclass(frozen=True, slots=True)
class HostSample:
    """How busy the machine is: `cpu` in percent of all cores, the others as `(used, total)` in bytes."""

    cpu: float
    memory: tuple[int, int]
    disk: tuple[int, int] | None
    shared_memory: tuple[int, int] | None
    time: float


@dataclass(frozen=True, slots=True)
class StateChange:
    """A rank, or with `rank=None` the whole run, came into a state; `detail` is for people."""

    rank: int | None
    state: State
    time: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Quiet:
    """
    Nothing has come from any rank for `seconds`; with 0 something has again.

    `text` says, for people, which ranks wait where, and which one is elsewhere.
    """

    seconds: float
    text: str
    time: float


class Frame(NamedTuple):
    """A call of a traceback: its place as a person names it, the function, the line; `own` where it is the person's code."""

    place: str
    function: str
    source: str
    own: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """
    A rank failed.

    `type` and `message` are those of its exception, `traceback` the text that a person should read; a process that died
    without one has an `exit_code` (negative: the signal that ended it, as in `subprocess`) and `last_lines`, what it wrote last.
    `lost_connection` says that the rank only noticed that another one had gone, `ended_by_us` that it was ended because of another.
    `frames` are the calls of the traceback, outermost first, `advice` a sentence on what to do about a mistake that is known.
    """

    rank: int
    type: str
    message: str
    traceback: str
    time: float
    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()
    lost_connection: bool = False
    ended_by_us: bool = False
    frames: tuple[Frame, ...] = ()
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """A rank of a session has done what was asked of it under a number; 0 is to get ready."""

    rank: int
    number: int


Event: TypeAlias = (
    LogLine | Metric | Progress | Display | DeviceSample | HostSample | StateChange | Quiet | Failure | Answered
)

KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (LogLine, Metric, Progress, Display, DeviceSample, HostSample, StateChange, Quiet, Failure, Answered)
}


def to_line(event: Event) -> bytes:
    """An event as one line of JSON, with its newline."""
    return json.dumps({"event": type(event).__name__, **asdict(event)}, default=str).encode() + b"\n"


def from_line(line: bytes | str) -> Event:
    """The event that `to_line` wrote; `ConfigurationError` names a kind that is not known here."""
    said: dict[str, Any] = json.loads(line)
    name = said.pop("event", None)
    kind = KINDS.get(name)
    if kind is None:
        raise ConfigurationError(f"A line holds an event of the kind {name!r}; known kinds are {', '.join(KINDS)}.")
    known = {field.name for field in fields(kind)}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in said.items() if key in known
    }
    if "frames" in values:
        values["frames"] = tuple(Frame(*frame) for frame in values["frames"])
    return kind(**values)
