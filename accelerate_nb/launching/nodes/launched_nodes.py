"""The nodes of a run that is launched on each of them, as one of them sees them: what all know, and how they let each other know."""

from __future__ import annotations

import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from accelerate_nb.events.model import NodeRanks
from accelerate_nb.launching.node_agent.node_network import NodeNetwork, connect
from accelerate_nb.launching.nodes.node_log import NodeLog
from accelerate_nb.launching.nodes.node_placement import NodeRoster, ranks_of_nodes
from accelerate_nb.launching.nodes.rendezvous_settings import (
    RendezvousSettings,
    interface_variables,
)
from accelerate_nb.launching.planning.placement import Placement
from accelerate_nb.launching.run_context import Stop, stronger
from accelerate_nb.transport.messages import (
    AgentLost,
    ConnectToPeers,
    ListenToPeers,
    Message,
    NodeLeft,
    NodeLogEntry,
    PeerEndpoint,
    PeersReached,
    RankEvent,
    RankExited,
    RequestStop,
    RunJoined,
    RunTimedOut,
    ToRank,
)
from accelerate_nb.transport.worker_spec import MasterAddress

# Between two looks at what is waited for, in seconds.
_PAUSE = 0.25
# How long node 0 keeps the log for others whose run ends, in seconds.
_LINGER = 5.0
# What ranks report that concerns other nodes.
RankReport = RankEvent | RankExited | AgentLost | ToRank | RunTimedOut


class LaunchedNodes(ABC):
    """
    The nodes of such a run as this one sees them, whose own ranks are those from `first_rank` on.

    What nodes have to know of each other goes through their log: each decides for itself, from the same reports.
    """

    def __init__(self, log: NodeLog, local: Placement, settings: RendezvousSettings) -> None:
        self._log, self.local, self._settings = log, local, settings
        self._joined: RunJoined | None = None
        # what was posted to this node, and why others have left or were lost, by their numbers
        self._inbox: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._replies: dict[int, queue.SimpleQueue[Message]] = defaultdict(queue.SimpleQueue)
        self._left: dict[int, str] = {}
        self._gone: dict[int, str] = {}
        # what ranks elsewhere report, by attempt
        self._reports: dict[int, queue.SimpleQueue[Message]] = defaultdict(queue.SimpleQueue)
        self._stop: Stop | None = None
        self.wake: Callable[[], None] = lambda: None
        self.on_stop: Callable[[Stop], None] = lambda _: None
        self._network = NodeNetwork(log.peers.address)
        log.start(self._on_entry, self._on_loss)

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def joined(self) -> RunJoined:
        """The nodes of the newest attempt, and this one's place among them."""
        assert self._joined is not None, "it is known once all have come"
        return self._joined

    @property
    def run(self) -> str:
        """The name of the run."""
        return self.joined.run

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all nodes."""
        return self.joined.names

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks of each."""
        return self.joined.sizes

    @property
    def ranks_here(self) -> range:
        """The ranks of this node."""
        first = sum(self.sizes[: self.joined.node_rank])
        return range(first, first + self.local.size)

    @property
    def node_ranks(self) -> list[NodeRanks]:
        """The ranks of each node."""
        return ranks_of_nodes(self.names, self.sizes)

    # it meets the others before anything is started again
    retries_at_once = False

    @property
    @abstractmethod
    def master(self) -> tuple[MasterAddress, socket.socket | None]:
        """Where the ranks of this attempt find each other, and on node 0 the socket that listens there."""

    def variables(self) -> dict[str, str]:
        """The variables that have collectives use the interface between the nodes."""
        return interface_variables(self._log.peers.address)

    # ------------------------------------------------------------------------------------------------- while it runs

    def post(self, message: Message, attempt: int) -> None:
        """Let the other nodes know what happened to a rank here."""
        self._log.post(message, attempt=attempt)

    def stop(self, how: Stop) -> None:
        """Have all nodes stop; what they know already is not posted again."""
        stop = stronger(self._stop, how)
        if stop != self._stop:
            self._stop = stop
            self._log.post(RequestStop(how))

    def reports(self, attempt: int) -> Iterator[Message]:
        """What ranks elsewhere have reported."""
        with suppress(queue.Empty):
            while True:
                yield self._reports[attempt].get_nowait()

    @abstractmethod
    def next_nodes(self, lost: Collection[int], is_stopped: Callable[[], bool]) -> str:
        """
        Meet the others for another attempt; returns what has changed in a sentence.

        Raises `LaunchError` where there is to be none.
        """

    def leave(self, reason: str) -> None:
        """Take part no more, for a reason in words: the run is over here, or is to be for all."""
        self._log.post(NodeLeft(reason))
        self._log.close(_LINGER)
        self._network.close()

    # ------------------------------------------------------------------------------------------- in the log's thread

    def _on_entry(self, entry: NodeLogEntry, message: Message) -> None:
        match message:
            case RequestStop(how):
                self._stop = stronger(self._stop, how)
                self.on_stop(how)
            case ListenToPeers() | ConnectToPeers() as query if entry.sender == 0:
                threading.Thread(target=self._reply, args=(query,), name="accelerate_nb query", daemon=True).start()
            case PeerEndpoint() | PeersReached():
                self._replies[entry.sender].put(message)
            case NodeLeft(reason):
                self._left[entry.sender] = reason
                self._lose(entry.sender, reason)
            case message if isinstance(message, RankReport):
                self._reports[entry.attempt].put(message)
            case _:
                self._inbox.put((entry.sender, message))
        self.wake()

    def _on_loss(self, number: int, reason: str) -> None:
        if number not in self._left:
            self._gone[number] = reason
            self._lose(number, reason)
        self.wake()

    def _lose(self, number: int, reason: str) -> None:
        """Have the attempt that goes on, and who waits, know that a node takes part no more."""
        self._inbox.put((number, NodeLeft(reason)))
        if self._joined is None or number not in self._joined.senders:
            return
        node = self._joined.senders.index(number)
        verb = "has left" if number in self._left else "was lost"
        ranks = tuple(NodeRoster(self.names, self.sizes).ranks_of(node))
        report = AgentLost(ranks, f"{self.names[node]} {verb}: {reason}", time.time())
        self._reports[self._joined.attempt].put(report)
        if self._log.number == 0:
            self.post(report, self._joined.attempt)

    def _reply(self, query: ListenToPeers | ConnectToPeers) -> None:
        self._log.post(network_reply(query, self._network), 0)

    def _next(self) -> tuple[int, Message] | None:
        """The next message to this node, waited for a moment."""
        try:
            return self._inbox.get(timeout=_PAUSE)
        except queue.Empty:
            return None


def network_reply(query: ListenToPeers | ConnectToPeers, network: NodeNetwork) -> Message:
    """The reply of this node to a check, which may take some seconds."""
    return network.listen(query) if isinstance(query, ListenToPeers) else connect(query)
