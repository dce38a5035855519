"""The messages between the processes of a run: one tagged union of frozen values (`encode` and `decode` are their codec)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from accelerate_nb.rank.stop_request import StopPoint, TrainingPosition
from accelerate_nb.transport.protocol.agent_messages import (
    AgentLost,
    CloseGroup,
    ConnectToPeers,
    GroupClosed,
    Heartbeat,
    HoldRanks,
    ListenToPeers,
    NodeFacts,
    NodeLoad,
    PeerEndpoint,
    PeersReached,
    QueryNode,
    QueryRankCollectives,
    QueryRankLog,
    QueryRankStacks,
    RankCollectives,
    RankEvent,
    RankExited,
    RankHeld,
    RankLog,
    RankOutcome,
    RankOutput,
    RankReports,
    RankStacks,
    RankTaskReply,
    ReleaseRanks,
    StartWorkers,
    StopRankAt,
    ToRank,
)
from accelerate_nb.transport.protocol.host_messages import HostFailed, HostNotice, HostReady
from accelerate_nb.transport.protocol.knob_messages import ChangeKnob, ChangeKnobAfter, HoldForKnob
from accelerate_nb.transport.protocol.message import Message
from accelerate_nb.transport.protocol.node_messages import (
    BreakGroups,
    EndRun,
    EndSession,
    JoinRun,
    MembershipGranted,
    RebuildGroups,
    RequestMembership,
    RequestStop,
    RunEvent,
    RunJoined,
    RunRefused,
    StartGroup,
)
from accelerate_nb.transport.protocol.profile_messages import ProfileSteps, RequestProfile
from accelerate_nb.transport.worker_spec import LocalWorker

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
class ForkFailed(Message):
    """A worker with these ranks could not be forked, for a reason of the system's (`errno`)."""

    ranks: tuple[int, ...]
    number: int


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
    Do a session's task; the descriptors are the files of its request and of its reply, which the agent adds.

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
    """
    The collectives that are under way in a rank by torch's flight recorder, oldest first.

    The last entry may be of the ranks without which the call does not return that the rank is in: `{"awaited": [0, 1]}`.
    """

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


@dataclass(frozen=True, slots=True)
class FetchRankLog(Message):
    """Reply with the file that holds all that a rank wrote so far (`RankLogFile`), fetched from its machine."""

    rank: int


# ------------------------------------------------------------------------------------------ run host to attached process


@dataclass(frozen=True, slots=True)
class StacksReply(Message):
    """The position of every rank, as a person reads it."""

    text: str


@dataclass(frozen=True, slots=True)
class RankLogFile(Message):
    """The file of a rank's log on this machine; where a part can't be fetched, a line in it says so."""

    path: str


@dataclass(frozen=True, slots=True)
class LiveState(Message):
    """The events that make up the part of a run's state that its folder does not keep, and whether the run is over."""

    done: bool
    events: tuple[Mapping[str, Any], ...]


# ----------------------------------------------------------------------------------------------- beside other messages


@dataclass(frozen=True, slots=True)
class FilePart(Message):
    """
    A part of a file that a following message carries, over a connection that passes no descriptors.

    Its `size` bytes come after the message, as they are.
    """

    size: int
    is_last: bool


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
    "fork_failed": ForkFailed,
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
    "fetch_rank_log": FetchRankLog,
    "rank_log_file": RankLogFile,
    "stacks_reply": StacksReply,
    "live_state": LiveState,
    "start_workers": StartWorkers,
    "to_rank": ToRank,
    "hold_ranks": HoldRanks,
    "stop_rank_at": StopRankAt,
    "release_ranks": ReleaseRanks,
    "query_rank_stacks": QueryRankStacks,
    "query_rank_collectives": QueryRankCollectives,
    "query_rank_log": QueryRankLog,
    "close_group": CloseGroup,
    "rank_event": RankEvent,
    "rank_output": RankOutput,
    "rank_held": RankHeld,
    "rank_task_reply": RankTaskReply,
    "rank_outcome": RankOutcome,
    "rank_exited": RankExited,
    "rank_reports": RankReports,
    "node_load": NodeLoad,
    "agent_lost": AgentLost,
    "rank_stacks": RankStacks,
    "rank_collectives": RankCollectives,
    "rank_log": RankLog,
    "group_closed": GroupClosed,
    "query_node": QueryNode,
    "node_facts": NodeFacts,
    "listen_to_peers": ListenToPeers,
    "peer_endpoint": PeerEndpoint,
    "connect_to_peers": ConnectToPeers,
    "peers_reached": PeersReached,
    "heartbeat": Heartbeat,
    "file_part": FilePart,
    "hold_for_knob": HoldForKnob,
    "change_knob_after": ChangeKnobAfter,
    "change_knob": ChangeKnob,
    "host_notice": HostNotice,
    "host_ready": HostReady,
    "host_failed": HostFailed,
    "profile_steps": ProfileSteps,
    "request_profile": RequestProfile,
    "join_run": JoinRun,
    "run_joined": RunJoined,
    "run_refused": RunRefused,
    "start_group": StartGroup,
    "run_event": RunEvent,
    "request_stop": RequestStop,
    "end_run": EndRun,
    "break_groups": BreakGroups,
    "rebuild_groups": RebuildGroups,
    "end_session": EndSession,
    "request_membership": RequestMembership,
    "membership_granted": MembershipGranted,
}
