"""The events of a run: one frozen class for each type of event; and the first cause among failures."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

Stream: TypeAlias = Literal["stdout", "stderr"]
Meaning: TypeAlias = Literal["", "bar", "warning", "error"]
State: TypeAlias = Literal["starting", "running", "stopping", "finished", "failed", "stopped"]

# A view of an ipywidgets widget in a MIME bundle, whose model is in the process that showed it.
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# The states after which nothing more happens, and the others.
OVER: frozenset[State] = frozenset({"finished", "failed", "stopped"})
GOING_ON: frozenset[State] = frozenset({"starting", "running", "stopping"})


class BaseEvent(msgspec.Struct, frozen=True, tag_field="type"):
    """The base of every event, which goes from a worker to its agent, into the run's state, and mostly into the run's folder."""

    # A tag stays what it is when its class is renamed: folders of earlier runs have it.


class LogLine(BaseEvent, frozen=True, tag="log"):
    """A rank wrote a line; `open`: it has not ended yet (a progress bar) and the next one replaces it."""

    rank: int
    stream: Stream
    text: str
    time: float
    open: bool = False
    # what the line is to who reads it (`events/line_reader.py`); an open line has none
    meaning: Meaning = ""


class Metric(BaseEvent, frozen=True, tag="metric"):
    """A rank logged a number under a name; `step` is the caller's own count."""

    rank: int
    name: str
    value: float
    step: int | None
    time: float


class Progress(BaseEvent, frozen=True, tag="progress"):
    """A rank has done `done` of `total` units of something, at a `rate` in units a second."""

    rank: int
    label: str
    done: float
    total: float | None
    time: float
    rate: float | None = None
    unit: str = "it"
    # the bar has ended and will not move again
    closed: bool = False
    # the bar's own name in its rank, or else its label: an event replaces the last one of the same bar
    bar: str = ""
    # what its owner adds at the moment, such as a loss
    note: str = ""


class Display(BaseEvent, frozen=True, tag="display"):
    """A rank showed something rich: a MIME bundle, as IPython's `display` makes it."""

    rank: int
    data: dict[str, Any]
    metadata: dict[str, Any]
    time: float
    # IPython's `display_id`, where it may be shown again; with `update` it replaces what was shown under that name
    name: str = ""
    update: bool = False


class DeviceSample(BaseEvent, frozen=True, tag="device_sample"):
    """The load of a device: `utilisation` in percent, memory in bytes."""

    rank: int
    device: str
    utilisation: float | None
    memory_used: int | None
    memory_total: int | None
    time: float


class HostSample(BaseEvent, frozen=True, tag="host_sample"):
    """The load of node number `node`, or of the machine that launched the run: `cpu` in percent of all cores."""

    cpu: float
    # `(used, total)` in bytes, as the two below
    memory: tuple[int, int]
    disk: tuple[int, int] | None
    shared_memory: tuple[int, int] | None
    time: float
    node: int | None = None


class StateChange(BaseEvent, frozen=True, tag="state_change"):
    """A rank, or with `rank=None` the whole run, came into a state; `detail` is for people."""

    rank: int | None
    state: State
    time: float
    detail: str = ""


class IdleWarning(BaseEvent, frozen=True, tag="idle_warning"):
    """Nothing has come from any rank for `seconds`, with 0 something has again; `text` names who waits where."""

    seconds: float
    text: str
    time: float


class Frame(NamedTuple):
    """A call of a traceback: its position as it is shown, the function, the line; `own` where it is the user's code."""

    place: str
    function: str
    source: str
    own: bool


class Failure(BaseEvent, frozen=True, tag="failure"):
    """A rank failed, with an exception, or by the end of its process."""

    rank: int
    type: str = msgspec.field(name="exception")
    message: str
    # the text that a person should read, and the calls in it, outermost first
    traceback: str
    time: float
    # of a process that died without an exception (negative: the signal that ended it), and what it wrote last
    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()
    # the rank only noticed that another one had gone, or was ended because of another
    lost_connection: bool = False
    ended_by_us: bool = False
    frames: tuple[Frame, ...] = ()
    # what to do about a mistake that is known
    advice: str = ""


class Hang(BaseEvent, frozen=True, tag="hang"):
    """The run had not ended after `timeout` seconds, and was stopped; `None`: its ranks waited for one that had returned."""

    timeout: float | None
    # which ranks waited where, and which one was elsewhere
    text: str
    stacks: str
    time: float


class TaskDone(BaseEvent, frozen=True, tag="task_done"):
    """A rank of a session has done the task of a number; 0 is to get ready."""

    rank: int
    number: int


class FirstStep(BaseEvent, frozen=True, tag="first_step"):
    """A rank has made its first optimizer step since its process was started."""

    rank: int
    time: float


class Restart(BaseEvent, frozen=True, tag="restart"):
    """All ranks start again after `delay` seconds, as attempt number `attempt`, since one failed or nodes have come."""

    # the first attempt has the number 0, and at most `max_restarts` others follow, unless more nodes come
    attempt: int
    max_restarts: int
    reason: str
    delay: float
    time: float
    # the number of ranks from then on, where it is another one
    ranks: int | None = None


class NodeRanks(BaseEvent, frozen=True, tag="node_ranks"):
    """The ranks `first` to `last` of a run on several nodes are on node number `node`, which people know by its name."""

    node: int
    name: str
    first: int
    last: int

    @property
    def label(self) -> str:
        """The node's number with its name: `node 1 · gpu-b`."""
        number = f"node {self.node}"
        return self.name if self.name.startswith(number) else f"{number} · {self.name}"


class MeshCoordinates(BaseEvent, frozen=True, tag="mesh_coordinates"):
    """The index of a rank along each axis of the mesh of its training, from the outermost axis to the innermost."""

    rank: int
    coordinates: dict[str, int]
    time: float


class PrecisionChoice(BaseEvent, frozen=True, tag="precision_choice"):
    """The precision that a rank's training computes in, by its setting's name; "no" is that of the weights."""

    rank: int
    name: str
    time: float


class StepBreakdown(BaseEvent, frozen=True, tag="step_breakdown"):
    """The seconds that a rank's steps took, a mean over those since the last event, up to step number `step`."""

    rank: int
    step: int
    # what the loop waited for its loader
    data: float
    forward: float
    backward: float
    # what it waited for other ranks after its last gradient was computed
    communication: float
    optimizer: float
    idle: float
    time: float
    workers: int | None = None
    # `torch.compile` made a graph in the first step, which has an event of its own
    compiled: bool = False
    # what the thread waited for one of its machine's `cores`, in any of the parts; `None` where the system does not count it
    preempted: float | None = None
    cores: int | None = None

    @property
    def total(self) -> float:
        """The seconds of the whole step."""
        return self.data + self.forward + self.backward + self.communication + self.optimizer + self.idle


class MemoryUse(BaseEvent, frozen=True, tag="memory_use"):
    """The bytes that a rank's prepared models and optimizers hold on its device, measured after its first step."""

    rank: int
    weights: int
    gradients: int
    optimizer: int
    # the most that was allocated on its GPU until now, activations among it; `None` where there is none
    peak: int | None
    time: float
    # what is in use of the GPU by whomever; on a CPU, the memory of the process
    used: int | None = None
    total: int | None = None


class KnobValue(BaseEvent, frozen=True, tag="knob_value"):
    """The value of a rank's knob from a step on, declared or `changed`; `least` and `most` are its bounds, where it has any."""

    rank: int
    name: str
    value: float
    step: int
    least: float | None
    most: float | None
    time: float
    changed: bool = False


class HeldAt(BaseEvent, frozen=True, tag="held_at"):
    """A rank's progress where it was asked to hold, by the request's number; it waits there, where it has a boundary."""

    rank: int
    number: int
    # the optimizer steps made, `None` where it makes none
    steps: int | None
    # seconds from one boundary to the next so far, 0 before the first
    pace: float = 0.0
    # whether its function checks for a stop itself, and whether it is saving at this moment
    checks: bool = False
    saves: bool = False
    # how often it checked without a step before
    stepless_checks: int = 0

    @property
    def has_boundary(self) -> bool:
        """Whether the rank comes to an end of a step, or to a check."""
        return self.steps is not None or self.checks


class ProfiledOperation(NamedTuple):
    """An operation of profiled steps: its calls, the seconds spent in itself alone, and their share of all such time."""

    name: str
    calls: int
    seconds: float
    share: float
    # "cpu", or the type of the device
    device: str


class ProfileRequested(BaseEvent, frozen=True, tag="profile_requested"):
    """A rank is to profile its next `steps` optimizer steps; `number` counts the profiles of the run."""

    rank: int
    number: int
    steps: int
    time: float


class StepProfile(BaseEvent, frozen=True, tag="step_profile"):
    """The costliest operations of a rank's steps, the costliest first, as torch's profiler saw them in so many seconds."""

    rank: int
    number: int
    # fewer than were requested where the function has ended
    steps: int
    seconds: float
    operations: tuple[ProfiledOperation, ...]
    # the file of its trace on the rank's machine
    trace: str
    time: float
    # why there is no profile, empty where there is one
    problem: str = ""


# What a rank puts out, and what it says of itself, of which the newest counts.
Shown: TypeAlias = LogLine | Display
_StepFact: TypeAlias = StepBreakdown | ProfileRequested | StepProfile
RankFact: TypeAlias = Progress | DeviceSample | MemoryUse | MeshCoordinates | Failure | _StepFact
_OfRank: TypeAlias = Shown | RankFact | Metric | KnobValue | PrecisionChoice | FirstStep | HeldAt | TaskDone
Event: TypeAlias = _OfRank | HostSample | StateChange | IdleWarning | Hang | Restart | NodeRanks


# ------------------------------------------------------------------------------------------------ displays of a type of their own

CheckState: TypeAlias = Literal["waiting", "running", "passed", "failed", "left out"]

_CHECK = "application/vnd.accelerate-nb.check+json"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check of a self-test: its name, its state, its finding; `advice` is what to do about a failure."""

    name: str
    title: str
    state: CheckState
    text: str = ""
    advice: str = ""

    def display(self, rank: int) -> Display:
        """The check as the event that a worker sends."""
        text = f"{self.state}: {self.title}" + (f": {self.text}" if self.text else "")
        return Display(rank, {_CHECK: msgspec.to_builtins(self), "text/plain": text}, {}, time.time())

    @staticmethod
    def of(event: Event) -> CheckResult | None:
        """The check that an event is, if it is one."""
        if not isinstance(event, Display) or _CHECK not in event.data:
            return None
        return msgspec.convert(event.data[_CHECK], CheckResult)


_LOST_LINE = re.compile(r"connection (closed|reset)|broken pipe|socket closed", re.IGNORECASE)


def cause(failures: Sequence[Failure]) -> Failure:
    """The failure that led to the others: the first that neither lost its connection to another rank nor was ended by us."""
    return min(failures, key=lambda item: (item.ended_by_us, item.lost_connection, _was_aborted(item), item.time))


def _was_aborted(failure: Failure) -> bool:
    """C++ code calls abort at an exception that nothing catches, a lost connection for one."""
    return failure.exit_code == -signal.SIGABRT and any(_LOST_LINE.search(line) for line in failure.last_lines)
