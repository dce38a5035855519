"""The messages between the processes of a run: who sends each of them to whom, and what is in it."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from accelerate_nb.events.event_types import DeviceSample, Event, HostSample, LogLine
from accelerate_nb.rank.step_hold import StopPoint
from accelerate_nb.transport.worker_spec import LocalWorker, NetworkAddress, WorkerSpec

# The version of the messages: to be raised when a message changes in what it means or holds.
VERSION = 14
# How often each end of an agent's channel says that it is there while workers run, in seconds.
HEARTBEAT_INTERVAL = 1.0


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base of every message: none is ever unpickled, and each field is compared with its type when it arrives."""

    # the number of descriptors that come with it; `None` stands for any
    carries: ClassVar[int | None] = 0


# ------------------------------------------------------------------------------------------- a kernel to its supervisor


class OpenGroup(Message, frozen=True):
    """Workers of a run will follow; the descriptor is the socket that reports on them, and closing it ends them."""

    carries: ClassVar[int | None] = 1
    run: str


class ForkSupervisor(Message, frozen=True):
    """Fork a supervisor like this one; the descriptor is its end of the socket over which another process uses it."""

    carries: ClassVar[int | None] = 1


class ForkWorker(Message, frozen=True):
    """Fork a worker; the descriptors are its own (`WorkerDescriptors.all`)."""

    carries: ClassVar[int | None] = None
    run: str
    worker: LocalWorker


class ImportModules(Message, frozen=True):
    """Import these modules, with these variables, when nothing runs, and nothing has for `idle_for` seconds."""

    names: tuple[str, ...]
    environ: dict[str, str]
    idle_for: float = 0.0


class SignalRanks(Message, frozen=True):
    """Send a signal to the workers of these ranks. A worker group sends it to its agents, too."""

    number: int
    ranks: tuple[int, ...]


class KillGroup(Message, frozen=True):
    """Kill every worker of the group, and what it started. A worker group sends it to its agents, too."""


# ------------------------------------------------------------------------------------------- a supervisor to its kernel


class VariablesRead(Message, frozen=True):
    """The variables that imported modules have read, with their values; `None` where there was none."""

    values: dict[str, str | None]


class SupervisorStarted(Message, frozen=True):
    """The first message of a forked supervisor."""

    pid: int


class WorkerStarted(Message, frozen=True):
    """The worker of a rank was forked."""

    rank: int
    pid: int


class ForkFailed(Message, frozen=True):
    """The worker of a rank could not be forked, for a reason of the system's (`errno`)."""

    rank: int
    number: int


class WorkerExited(Message, frozen=True):
    """The worker of a rank has ended; a negative code is the signal that ended it."""

    rank: int
    code: int


# ----------------------------------------------------------------------------------------------------- to a new process


class BeginWorker(Message, frozen=True):
    """Be this worker; the descriptors are its own (`WorkerDescriptors.all`)."""

    carries: ClassVar[int | None] = None
    worker: LocalWorker


# ------------------------------------------------------------------------------------------- a node's agent to a worker


class QueryPosition(Message, frozen=True):
    """Write a `PositionReply` into the file of stacks."""


class LeaveGroup(Message, frozen=True):
    """End the process: every rank has returned."""


# -------------------------------------------------------------------- a run to a worker, by way of its agent (`ToRank`)


class HoldAtStep(Message, frozen=True):
    """Wait at the end of the step, and send the event `HeldAt`; what to do comes by `StopAt` or `ChangeKnobAfter`."""

    rank: int
    number: int


class StopAt(Message, frozen=True):
    """Go on to a point, and stop there."""

    point: StopPoint


class ChangeKnobAfter(Message, frozen=True):
    """Change a knob after so many steps; with `None`, go on without the change."""

    number: int
    name: str
    value: float
    after: int | None


class ProfileSteps(Message, frozen=True):
    """Profile the next steps, and send the event `StepProfile` of this number; `folder` is that of the run."""

    rank: int
    number: int
    steps: int
    folder: str


class BeginTask(Message, frozen=True):
    """Do a session's task; the descriptors are the files of its request and of its reply, which the agent adds."""

    carries: ClassVar[int | None] = 2
    number: int
    # the name under which the process groups are rebuilt first
    renewal: str | None
    # the other ranks' process numbers
    others: tuple[int, ...]


class InterruptTask(Message, frozen=True):
    """Interrupt the task of this number, if it is the one that runs."""

    number: int
    others: tuple[int, ...]


class CloseSession(Message, frozen=True):
    """End the session after the tasks that have come."""


# ----------------------------------------------------------------------------------- a worker to its agent, into a pipe


class PositionReply(Message, frozen=True):
    """The calls of a rank's main thread, as faulthandler writes them, and its collectives under way by torch's flight recorder, oldest first."""

    stack: str
    # the last may name the ranks without which the call does not return that the rank is in: `{"awaited": [0, 1]}`
    entries: tuple[Mapping[str, Any], ...]


# ------------------------------------------------------------------------------------------- a worker group to an agent


class StartWorkers(Message, frozen=True):
    """Start a worker for each spec; the descriptors are those of their payload, and of rank 0's store where it `has_store`."""

    carries: ClassVar[int | None] = None
    specs: tuple[WorkerSpec, ...]
    has_store: bool = False
    # below that of the specs
    inherits_environment: bool = False
    # the name of a folder of the node that keeps the ranks' whole logs; a part of what they write is sent (`RankOutput`)
    log_folder: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(spec.rank_info.rank for spec in self.specs)


RankMessage: TypeAlias = HoldAtStep | StopAt | ChangeKnobAfter | ProfileSteps | BeginTask | InterruptTask | CloseSession


class ToRank(Message, frozen=True):
    """Send a message to a rank's inbox, with its descriptors: of a `BeginTask` its request, for the agent adds the reply's."""

    carries: ClassVar[int | None] = None
    rank: int
    message: RankMessage


class ReleaseRanks(Message, frozen=True):
    """Let these ranks end their processes."""

    ranks: tuple[int, ...]


class QueryRankStacks(Message, frozen=True):
    """Reply to the query of this number with the stacks and the collectives of these ranks (`RankStacks`)."""

    number: int
    ranks: tuple[int, ...]


class QueryNode(Message, frozen=True):
    """Reply with the facts of the node (`NodeFacts`)."""


class ListenToPeers(Message, frozen=True):
    """Listen on the interface that routes to these addresses, at a port or, with 0, at any free one (`PeerEndpoint`)."""

    # On the node of rank 0 its workers' rendezvous is there. A socket from before is closed.

    port: int
    peers: tuple[str, ...]


class ConnectToPeers(Message, frozen=True):
    """Connect to every one of these endpoints for a moment, within so many seconds (`PeersReached`)."""

    endpoints: tuple[NetworkAddress, ...]
    timeout: float


class CloseGroup(Message, frozen=True):
    """Report what is left, end whatever still runs, and reply with `GroupClosed`; other workers may follow."""


# --------------------------------------------------------------------------------------------------- both to each other


class Heartbeat(Message, frozen=True):
    """The sender is there; while workers run, one goes in each direction every `HEARTBEAT_INTERVAL` seconds."""


# ------------------------------------------------------------------------------------------- an agent to a worker group


class NodeFacts(Message, frozen=True):
    """The facts of an agent's node, reached at `address`; the versions are empty where a package is not installed."""

    host: str
    address: str
    python: str
    torch: str
    accelerate_nb: str
    device_kind: str
    device_label: str
    devices: int
    cores: int
    # its clock, in seconds since 1970
    time: float


class PeerEndpoint(Message, frozen=True):
    """The address at which other nodes reach this one, with its interface; with an `error` there is none."""

    host: str
    port: int
    interface: str
    error: str = ""


class PeersReached(Message, frozen=True):
    """Why each endpoint that could not be connected to could not, by its number among those of the request as a text."""

    errors: Mapping[str, str]


class RankEvent(Message, frozen=True):
    """An event that a rank sent; each rank's reports are numbered one after the other, from 0."""

    rank: int
    number: int
    event: Event


class RankOutput(Message, frozen=True):
    """What a rank wrote: the bytes of its log, and the lines to show."""

    rank: int
    number: int
    raw: bytes
    lines: tuple[LogLine, ...]
    # so many bytes before them are left out; then `whole_log` is the file on the node that holds all of them
    left_out: int = 0
    whole_log: str = ""


class RankTaskReply(Message, frozen=True):
    """A rank has done a session's task; the descriptor is the file of its reply. The event `TaskDone` follows."""

    carries: ClassVar[int | None] = 1
    rank: int
    number: int
    task: int


class RankOutcome(Message, frozen=True):
    """The descriptor is the file in which a rank left its outcome; it comes before the rank's `RankExited`, where there is one."""

    carries: ClassVar[int | None] = 1
    rank: int
    number: int


class RankExited(Message, frozen=True):
    """A rank's process has ended, at a time in seconds since 1970; a negative code is the signal that ended it."""

    rank: int
    number: int
    code: int
    time: float
    # what the process wrote about its own crash, as faulthandler writes it; empty for other ends
    stacks: str = ""
    # it still ran when its agent was ordered to kill it
    killed: bool = False


class AgentLost(Message, frozen=True):
    """These workers, which are all of an agent, can't be observed any more, since a time in seconds since 1970."""

    ranks: tuple[int, ...]
    reason: str
    time: float


RankReport: TypeAlias = RankEvent | RankOutput | RankExited | AgentLost
# Those that the agent numbers.
NumberedReport: TypeAlias = RankEvent | RankOutput | RankTaskReply | RankOutcome | RankExited


class RankReports(Message, frozen=True):
    """Several reports about ranks in the order in which they were made, none of them with descriptors."""

    reports: tuple[RankReport, ...]


class NodeLoad(Message, frozen=True):
    """The load of the agent's node, and of its ranks' devices; sent every few seconds while workers run."""

    sample: HostSample
    devices: tuple[DeviceSample, ...] = ()


class RankStacks(Message, frozen=True):
    """The stack dump of each rank that runs, by its number as a text, and the collectives of those that replied in time."""

    number: int
    stacks: Mapping[str, str]
    collectives: Mapping[str, tuple[Mapping[str, Any], ...]]


class GroupClosed(Message, frozen=True):
    """All of a group's workers have ended, and all that they left was reported."""


# ------------------------------------------- between nodes on each of which a run is launched, by way of node 0


class NodeMessage(Message, frozen=True):
    """The message in `body` (`encode`) for the node `to`, or for all; node 0 says who sends it, and passes it on."""

    # Nodes are numbered in the order in which they came to node 0. What ranks report is of an attempt of the run.

    sender: int
    to: int | None
    attempt: int
    body: bytes


class JoinRun(Message, frozen=True):
    """Join the run of so many nodes with `processes` ranks on devices of a kind (`RunJoined`, or `RunRefused`)."""

    run_id: str
    nodes: int
    # `None` where the node takes any
    node_rank: int | None
    processes: int
    kind: str
    facts: NodeFacts


class NodeReady(Message, frozen=True):
    """The sender's ranks of former attempts have ended, and it waits for its place in this one (`RunJoined`)."""

    attempt: int


class RunJoined(Message, frozen=True):
    """All nodes of an attempt have come: the receiver's rank among them, and each one's number, name, and number of ranks."""

    run: str
    attempt: int
    node_rank: int
    senders: tuple[int, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    # of node 0, where the ranks find each other, and whose settings hold for all
    port: int
    max_restarts: int
    restart_delay: float
    timeout: float | None
    # what has changed since the last attempt
    text: str = ""


class RunRefused(Message, frozen=True):
    """There is no run for the receiver, for a reason in words."""

    reason: str


class RequestStop(Message, frozen=True):
    """Stop the whole run, on all nodes (`Run.request_stop`); an attached process sends it to a run host, too, whose reply is a `LiveState`."""

    how: Literal["finish", "interrupt", "kill"]


class RunTimedOut(Message, frozen=True):
    """The time that the run may take is over on the sender's node."""


class NodeLeft(Message, frozen=True):
    """The sender takes part no more, for a reason in words: its run is over."""

    reason: str


# ---------------------------------------------------------------------------- a machine that joins a notebook, and back


class RequestMembership(Message, frozen=True):
    """Let the sender, which has proved the token, be a machine of the receiver's launches, under a name like this one (`MembershipGranted`)."""

    name: str


class MembershipGranted(Message, frozen=True):
    """The receiver is a machine of the sender's launches, by this name."""

    name: str


# --------------------------------------------------------------- a run host that starts, to the process that started it


class ShowText(Message, frozen=True):
    """Show a text on standard error."""

    text: str


class RunStarted(Message, frozen=True):
    """Processes can attach to the run, which begins."""


class LaunchFailed(Message, frozen=True):
    """There is no run, for an error of this package, by the name of its class."""

    error_kind: str
    error: str


# ------------------------------------------------------------------------------------ an attached process to a run host


class ChangeKnob(Message, frozen=True):
    """Change a knob of the run; the reply is a `LiveState`."""

    name: str
    value: float


class RequestProfile(Message, frozen=True):
    """Profile the next steps of these ranks; the reply is a `LiveState`."""

    steps: int
    ranks: tuple[int, ...]


class QueryStacks(Message, frozen=True):
    """Reply with a `StacksReply`."""


class QueryLiveState(Message, frozen=True):
    """Reply with a `LiveState`."""


# ------------------------------------------------------------------------------------ a run host to an attached process


class StacksReply(Message, frozen=True):
    """The position of every rank, as a person reads it."""

    text: str


class LiveState(Message, frozen=True):
    """The events that make up the part of a run's state that its folder does not keep, and whether the run is over."""

    done: bool
    events: tuple[Event, ...]


# ------------------------------------------------------------------------------------------------ beside other messages


class FilePart(Message, frozen=True):
    """A part of a following message's file, where no descriptors are passed; its `size` bytes come after this message."""

    size: int
    is_last: bool
