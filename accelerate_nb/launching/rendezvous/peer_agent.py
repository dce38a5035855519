"""The ranks of another node of a run that is launched on each, as node 0 sees them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.node_agent.agent import AgentLoop, Report
from accelerate_nb.launching.node_agent.remote_agent import NodeLink, RemoteAgent
from accelerate_nb.launching.run_context import Stop
from accelerate_nb.transport.channel import (
    Channel,
    ReceivedMessage,
    Reply,
)
from accelerate_nb.transport.messages import (
    BreakGroups,
    EndSession,
    Message,
    PeerEndpoint,
    PeersReached,
    RankOutcome,
    RankTaskReply,
    RequestStop,
    StartGroup,
    StartWorkers,
)


class PeerAgent(RemoteAgent):
    """
    The ranks of another node, whose own process starts them with its own function.

    No code goes there, and no outcome is taken from there, which would have to be unpickled: values stay on their node. It is among
    those that are `running` from its start to its end, and carries out `request` meanwhile.
    """

    has_outcomes = False
    takes_sockets = False

    def __init__(
        self,
        channel: Channel,
        loop: AgentLoop,
        report: Report,
        node: NodeLink,
        *,
        sizes: tuple[int, ...],
        port: int,
        running: dict[str, PeerAgent],
        on_stop: Callable[[Stop], None],
        on_session_report: Callable[[str, Message], None],
    ) -> None:
        super().__init__(channel, loop, report, node)
        self._sizes, self._port, self._running, self._on_stop = sizes, port, running, on_stop
        self._on_session_report = on_session_report
        self._check_replies: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.name = node.name

    def start(self, request: StartWorkers, descriptors: Sequence[int]) -> None:
        """Have the node start its ranks."""
        self._begin(request.ranks)
        rank_info = request.processes[0][0].rank_info
        self._channel.try_send(StartGroup(rank_info.restart_count, rank_info.node_rank, self._sizes, self._port))
        self._running[self.name] = self

    def close(self) -> None:
        """Have whatever still runs ended."""
        self._running.pop(self.name, None)
        super().close()

    def request(self, message: Message, reply_class: type[Reply], timeout: float) -> Reply:
        """Send a message of a check, and wait for its reply; raises `LaunchError` where none comes."""
        deadline = time.monotonic() + timeout
        self._channel.try_send(message)
        while (left := deadline - time.monotonic()) > 0:
            with suppress(queue.Empty):
                reply = self._check_replies.get(timeout=left)
                if isinstance(reply, reply_class):
                    return reply
        raise LaunchError(
            f"A check of {self.name} was requested, and nothing came from it within {timeout:g} s. Launch again."
        )

    def _take(self, received: ReceivedMessage) -> bool:
        match received.message:
            case RequestStop(how):
                self._on_stop(how)
                return False
            case BreakGroups() | EndSession():
                self._on_session_report(self.name, received.message)
                return False
            case PeerEndpoint() | PeersReached():
                self._check_replies.put(received.message)
                return False
            case RankOutcome() | RankTaskReply():
                self._channel.refuse(received)
                return False
        return super()._take(received)
