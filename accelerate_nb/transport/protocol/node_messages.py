"""The messages between the nodes of a run that is launched on each of them; nothing in them is ever unpickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accelerate_nb.events.model import Event
from accelerate_nb.transport.protocol.message import Message

# ------------------------------------------------------------------------------------------ a node to the one that hosts


@dataclass(frozen=True, slots=True)
class JoinRun(Message):
    """
    Join the run `run_id` of `nodes` nodes with `processes` ranks that compute on devices of a kind (`RunJoined` or `RunRefused`).

    `facts` is a `NodeFacts`. `node_rank` is `None` where the node takes any.
    """

    run_id: str
    nodes: int
    node_rank: int | None
    processes: int
    kind: str
    facts: Message


@dataclass(frozen=True, slots=True)
class RequestStop(Message):
    """Stop the whole run, on all nodes."""

    how: Literal["finish", "interrupt", "kill"]


# ------------------------------------------------------------------------------------------ the node that hosts to another


@dataclass(frozen=True, slots=True)
class RunJoined(Message):
    """All nodes have come: the name of the run, the receiver's rank among nodes, and the name and the number of ranks of each."""

    run: str
    node_rank: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    max_restarts: int


@dataclass(frozen=True, slots=True)
class RunRefused(Message):
    """There is no run for the receiver, for a reason in words."""

    reason: str


@dataclass(frozen=True, slots=True)
class StartGroup(Message):
    """
    Start the receiver's own ranks, which were started again so many times; a `CloseGroup` ends them.

    `node_rank` is the receiver's rank among the nodes that take part now, `sizes` the number of ranks of each, and `port` the one of
    node 0 at which the ranks find each other.
    """

    restart_count: int
    node_rank: int
    sizes: tuple[int, ...]
    port: int


@dataclass(frozen=True, slots=True)
class RunEvent(Message):
    """What happened on other nodes."""

    event: Event


@dataclass(frozen=True, slots=True)
class EndRun(Message):
    """
    The run is over, in a state and with a detail.

    `failures` are those of ranks on all nodes, each a `Failure`; `error` is the text of an error of another class, "launch" or "hang".
    """

    state: Literal["finished", "failed", "stopped"]
    detail: str
    stopped_at: str | None = None
    failures: tuple[Event, ...] = ()
    error_kind: Literal["", "launch", "hang"] = ""
    error: str = ""


# ------------------------------------------------------------------------- between the sessions of a run's nodes and node 0's


@dataclass(frozen=True, slots=True)
class BreakGroups(Message):
    """To node 0: a cell has failed, for a reason in words, and left the process groups of this generation in a state that nobody knows."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RebuildGroups(Message):
    """To every node: rebuild the process groups, as this generation, since a cell of a node has failed; what runs elsewhere is ended."""

    generation: int
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class EndSession(Message):
    """To node 0, and from there to every node: close the session, for a reason in words."""

    reason: str


# ---------------------------------------------------------------------------------- a machine that joins a notebook, and back


@dataclass(frozen=True, slots=True)
class RequestMembership(Message):
    """Let the sender, which has proved the token, be a machine of the receiver's launches, under a name like this one (`MembershipGranted`)."""

    name: str


@dataclass(frozen=True, slots=True)
class MembershipGranted(Message):
    """The receiver is a machine of the sender's launches, by this name."""

    name: str
