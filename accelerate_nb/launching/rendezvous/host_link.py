"""The connection of a node to node 0, which conducts the run: its orders come in, and what happens here goes out."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from accelerate_nb.launching.node_agent.agent import Agent, Report
from accelerate_nb.launching.node_agent.node_network import NodeNetwork
from accelerate_nb.launching.rendezvous.node_checks import reply_to
from accelerate_nb.launching.rendezvous.peers import SILENCE_LIMIT, HeartbeatThread
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import (
    AgentLost,
    ChangeKnobAfter,
    CloseGroup,
    ConnectToPeers,
    EndRun,
    EndSession,
    Heartbeat,
    HoldAtStep,
    KillGroup,
    ListenToPeers,
    Message,
    ProfileSteps,
    QueryRankCollectives,
    QueryRankStacks,
    RankCollectives,
    RankEvent,
    RankExited,
    RankOutput,
    RankStacks,
    RebuildGroups,
    ReleaseRanks,
    RunEvent,
    SignalRanks,
    StartGroup,
    StopAt,
    ToRank,
)

# Nothing else is carried out for another node: what would run its code, or unpickle something of it, is refused.
_Order: TypeAlias = StartGroup | RunEvent | EndRun | CloseGroup | SignalRanks | KillGroup | ReleaseRanks
# The messages to a rank that are passed on, too.
_ToRank: TypeAlias = HoldAtStep | StopAt | ChangeKnobAfter | ProfileSteps
# What node 0 is told of the ranks here; their outcomes stay.
_Shared: TypeAlias = RankEvent | RankOutput | RankExited | AgentLost


class HostLink:
    """
    Node 0 at the other end of `channel`, by its name for people; `address` is this node's for others.

    Its orders are read in a thread of its own, and taken by the run's; `wake` is called when there is one. `agent` is this node's,
    while it has ranks, and `on_session_message` takes what is for its session. A loss of node 0 comes as an `AgentLost`.
    """

    def __init__(self, channel: Channel, name: str, address: str) -> None:
        self._channel, self._name, self._network = channel, name, NodeNetwork(address)
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._is_over = False
        self._thread = threading.Thread(target=self._receive, name="accelerate_nb node 0", daemon=True)
        self._heartbeats = HeartbeatThread([channel])
        self.wake: Callable[[], None] = lambda: None
        self.on_session_message: Callable[[Message], None] = lambda _: None
        self.agent: Agent | None = None

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()
        self._heartbeats.start()

    def close(self) -> None:
        """End the connection."""
        self._is_over = True
        self._heartbeats.stop()
        self._channel.shutdown()
        if self._thread.is_alive():
            self._thread.join()
        self._channel.close()
        self._network.close()

    def send(self, message: Message) -> None:
        """Send a message; where node 0 has gone, its loss is an order by itself."""
        self._channel.try_send(message)

    def sharing(self, report: Report) -> Report:
        """A taker of this node's reports that has node 0 take them, too."""

        def shared(message: Message, descriptors: Sequence[int]) -> None:
            if isinstance(message, _Shared):
                self.send(message)
            report(message, descriptors)

        return shared

    def next_order(self) -> Message:
        """The next order, waited for."""
        return self._orders.get()

    def orders(self) -> Iterator[Message]:
        """The orders that are there, without waiting."""
        while True:
            try:
                yield self._orders.get_nowait()
            except queue.Empty:
                return

    def put(self, order: Message) -> None:
        """Have an order of this process among those of node 0."""
        self._orders.put(order)
        self.wake()

    # ------------------------------------------------------------------------------------------- the thread that reads

    def _receive(self) -> None:
        reason = "its connection has ended"
        try:
            while (received := self._channel.receive(SILENCE_LIMIT)) is not None:
                match received.message:
                    case QueryRankStacks() | QueryRankCollectives() | ListenToPeers() | ConnectToPeers() as query:
                        threading.Thread(
                            target=self._reply, args=(query,), name="accelerate_nb query", daemon=True
                        ).start()
                    case Heartbeat():
                        pass
                    case RebuildGroups() | EndSession() as message:
                        self.on_session_message(message)
                    case ToRank(_, content) as message if isinstance(content, _ToRank):
                        self.put(message)
                    case message if isinstance(message, _Order):
                        self._is_over |= isinstance(message, EndRun)
                        self.put(message)
                    case _:
                        self._channel.refuse(received)
        except TimeoutError as error:
            reason = f"{error}: its machine or its process was stopped"
        except OSError as error:
            reason = f"its connection has ended: {error.strerror or error}"
        if not self._is_over:
            self.put(AgentLost((), f"{self._name}, which conducts the run, was lost: {reason}", time.time()))

    def _reply(self, query: Message) -> None:
        agent = self.agent
        if (reply := reply_to(query, self._network)) is not None:
            # another node has come, and it is checked that all can connect to each other
            self.send(reply)
        elif isinstance(query, QueryRankStacks):
            stacks = {} if agent is None else agent.stacks(query.ranks)
            self.send(RankStacks(query.number, {str(rank): text for rank, text in stacks.items()}))
        elif isinstance(query, QueryRankCollectives):
            found = {} if agent is None else agent.collectives(query.ranks)
            self.send(RankCollectives(query.number, {str(rank): tuple(items) for rank, items in found.items()}))
