"""The messages between a worker group and the agents of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from accelerate_nb.events.model import Event, LogLine
from accelerate_nb.rank.stop_request import StopPoint, TrainingPosition
from accelerate_nb.transport.protocol.message import Message
from accelerate_nb.transport.worker_spec import WorkerSpec

# How often each end says that it is there while workers run, in seconds.
HEARTBEAT_INTERVAL = 1.0


class NetworkAddress(NamedTuple):
    """A host, by its address, and a port of it."""

    host: str
    port: int


# ---------------------------------------------------------------------------------------------- worker group to an agent


@dataclass(frozen=True, slots=True)
class StartWorkers(Message):
    """
    Start one process for each tuple of workers, which are its ranks.

    The descriptors are those of their payload, where it is not inherited, and the listening socket of the rendezvous where rank 0 is
    among them and `has_store`. With `inherits_environment` the agent's own environment is below that of the specs. With a `log_folder`, the
    name of a folder among those of the node, the ranks' whole logs are kept there, and a part of what they write is sent (`RankOutput`).
    """

    carries: ClassVar[int | None] = None
    processes: tuple[tuple[WorkerSpec, ...], ...]
    has_store: bool = False
    inherits_environment: bool = False
    log_folder: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all processes."""
        return tuple(spec.rank_info.rank for process in self.processes for spec in process)


@dataclass(frozen=True, slots=True)
class ToRank(Message):
    """
    Send a message to a rank's inbox, with its descriptors.

    A `BeginTask` comes with its request alone: the file of the reply is the agent's, and returned in a `RankTaskReply`.
    """

    carries: ClassVar[int | None] = None
    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class HoldRanks(Message):
    """Have these ranks wait at the end of their step; each is answered with a `RankHeld`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopRankAt(Message):
    """Let a rank that holds go on to a point, and stop there."""

    rank: int
    point: StopPoint


@dataclass(frozen=True, slots=True)
class ReleaseRanks(Message):
    """Let these ranks end their processes."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QueryRankStacks(Message):
    """Reply to the query of this number with the stacks of these ranks (`RankStacks`)."""

    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QueryRankCollectives(Message):
    """Reply to the query of this number with the collectives that are under way in these ranks (`RankCollectives`)."""

    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QueryRankLog(Message):
    """Reply to the query of this number with so many bytes at most of a rank's log in this file, from an offset on (`RankLog`)."""

    number: int
    path: str
    offset: int
    most: int


@dataclass(frozen=True, slots=True)
class QueryNode(Message):
    """Reply with the facts of the node (`NodeFacts`)."""


@dataclass(frozen=True, slots=True)
class ListenToPeers(Message):
    """
    Listen on the interface that routes to these addresses of other nodes, at a port or, with 0, at any free one (`PeerEndpoint`).

    On the node of rank 0 its workers' rendezvous is there. A socket from before is closed.
    """

    port: int
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConnectToPeers(Message):
    """Connect to every one of these endpoints for a moment, within so many seconds (`PeersReached`)."""

    endpoints: tuple[NetworkAddress, ...]
    timeout: float


@dataclass(frozen=True, slots=True)
class CloseGroup(Message):
    """Report what is left, end whatever still runs, and reply with `GroupClosed`; other workers may follow."""


# ---------------------------------------------------------------------------------------------------- in both directions


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """The sender is there; while workers run, one goes in each direction every `HEARTBEAT_INTERVAL` seconds."""


# ---------------------------------------------------------------------------------------------- an agent to worker group


@dataclass(frozen=True, slots=True)
class NodeFacts(Message):
    """
    The facts of an agent's node: its host's name, the address at which it was reached, the versions of what it runs, and its devices.

    A version is empty where the package is not installed there. `time` is its clock in seconds since 1970.
    """

    host: str
    address: str
    python: str
    torch: str
    accelerate_nb: str
    device_kind: str
    device_label: str
    devices: int
    cores: int
    time: float


@dataclass(frozen=True, slots=True)
class PeerEndpoint(Message):
    """The address at which other nodes reach this one, with its interface; with an `error` there is none."""

    host: str
    port: int
    interface: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class PeersReached(Message):
    """Why each endpoint that could not be connected to could not, by its number among those of the request as a text."""

    errors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RankEvent(Message):
    """An event that a rank sent; each rank's reports are numbered one after the other, from 0."""

    rank: int
    number: int
    event: Event


@dataclass(frozen=True, slots=True)
class RankOutput(Message):
    """
    What a rank wrote: the bytes of its log, and the lines to show.

    Before them, so many bytes are left out; then `whole_log` is the file on the node that holds all of them.
    """

    rank: int
    number: int
    raw: bytes
    lines: tuple[LogLine, ...]
    left_out: int = 0
    whole_log: str = ""


@dataclass(frozen=True, slots=True)
class RankHeld(Message):
    """A rank's position when it was to hold; `None` where it comes to no boundary, or can't reply."""

    rank: int
    number: int
    position: TrainingPosition | None


@dataclass(frozen=True, slots=True)
class RankTaskReply(Message):
    """A rank has done a session's task; the descriptor is the file of its reply. The event `TaskDone` follows."""

    carries: ClassVar[int | None] = 1
    rank: int
    number: int
    task: int


@dataclass(frozen=True, slots=True)
class RankOutcome(Message):
    """The descriptor is the file in which a rank left its outcome; it comes before the rank's `RankExited`, where there is one."""

    carries: ClassVar[int | None] = 1
    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class RankExited(Message):
    """
    A rank's process has ended, at a time in seconds since 1970; a negative code is the signal that ended it.

    `stacks` is what the process wrote about its own crash, as faulthandler writes it; empty for other ends. `killed`: it still ran when
    its agent was ordered to kill it.
    """

    rank: int
    number: int
    code: int
    time: float
    stacks: str = ""
    killed: bool = False


@dataclass(frozen=True, slots=True)
class RankReports(Message):
    """Several reports about ranks in the order in which they were made, none of them with descriptors."""

    reports: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class NodeLoad(Message):
    """The load of the agent's node, a `HostSample`, and of its ranks' devices, `DeviceSample`s; sent every few seconds while workers run."""

    sample: Event
    devices: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentLost(Message):
    """These workers, which are all of an agent, can't be observed any more, since a time in seconds since 1970."""

    ranks: tuple[int, ...]
    reason: str
    time: float


@dataclass(frozen=True, slots=True)
class RankStacks(Message):
    """The stack dump of each rank that runs, by its number as a text; an empty one of a rank that sent none."""

    number: int
    stacks: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RankCollectives(Message):
    """The collectives that are under way in each rank that replied in time, by its number as a text."""

    number: int
    collectives: Mapping[str, tuple[Mapping[str, Any], ...]]


@dataclass(frozen=True, slots=True)
class RankLog(Message):
    """A part of a rank's log, and the size of the whole; -1 where it can't be read."""

    number: int
    data: bytes
    size: int


@dataclass(frozen=True, slots=True)
class GroupClosed(Message):
    """All of a group's workers have ended, and all that they left was reported."""
