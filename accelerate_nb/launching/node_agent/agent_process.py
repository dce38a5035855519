"""The process of a node's agent: it serves one worker group after the other, for the process at the other end of its channel."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.engines.base import Engine
from accelerate_nb.launching.engines.supervisor import SupervisorEngine, cool, warm
from accelerate_nb.launching.node_agent.agent import LONGEST_WAIT, NodeAgent
from accelerate_nb.launching.node_agent.agent_loop import AgentLoop
from accelerate_nb.transport.protocol.agent_messages import (
    AgentLost,
    CloseGroup,
    GroupClosed,
    HoldRanks,
    QueryRankCollectives,
    QueryRankStacks,
    RankCollectives,
    RankStacks,
    ReleaseRanks,
    StartWorkers,
    StopRankAt,
    ToRank,
)
from accelerate_nb.transport.protocol.channel import Channel, ReceivedMessage
from accelerate_nb.transport.protocol.message import Message
from accelerate_nb.transport.protocol.messages import KillGroup, SignalRanks


class AgentServer:
    """
    Serves the process at the other end of `channel`; when that has gone, the workers end with it.

    >>> AgentServer(channel, SupervisorEngine()).serve()
    """

    def __init__(self, channel: Channel, engine: Engine) -> None:
        self._channel, self._engine = channel, engine
        self._loop = AgentLoop()
        self._agent: NodeAgent | None = None
        self._is_ended = False

    def serve(self) -> None:
        """Carry out messages until the other end has gone, or `end` was called."""
        with self._loop:
            self._loop.register(self._channel, self._on_channel)
            while not self._is_ended:
                self._guarded(self._serve_once)
            self._close_group()

    def end(self) -> None:
        """End the workers and `serve`; may be called in a signal handler."""
        self._is_ended = True
        self._loop.wake()

    def _serve_once(self) -> None:
        agent = self._agent
        self._loop.wait(None if agent is None else agent.tick(time.monotonic(), LONGEST_WAIT))

    def _guarded(self, do: Callable[[], None]) -> None:
        """Do something for the group; where no workers can be started, or followed, they are lost."""
        try:
            do()
        except (LaunchError, OSError) as error:
            agent = self._agent
            if agent is None:
                raise
            self._close_group()
            self._report(AgentLost(agent.ranks, str(error), time.time()))

    def _on_channel(self) -> None:
        for received in self._channel.receive_ready():
            try:
                self._carry_out(received)
            finally:
                for descriptor in received.descriptors:
                    os.close(descriptor)
        self._is_ended |= self._channel.is_ended or bool(self._channel.refused["version"])

    def _carry_out(self, received: ReceivedMessage) -> None:
        message, descriptors = received
        agent = self._agent
        match message:
            case StartWorkers() if agent is None:
                self._agent = NodeAgent(self._engine, self._loop, self._report)
                self._agent.start(message, descriptors)
            case CloseGroup():
                if agent is not None:
                    agent.drain()
                self._close_group()
                self._report(GroupClosed())
            case QueryRankStacks(number, ranks):
                self._reply(lambda: RankStacks(number, {str(rank): text for rank, text in _stacks(agent, ranks)}))
            case QueryRankCollectives(number, ranks):
                self._reply(
                    lambda: RankCollectives(number, {str(rank): found for rank, found in _collectives(agent, ranks)})
                )
            case ToRank() | SignalRanks() | KillGroup() | HoldRanks() | StopRankAt() | ReleaseRanks():
                if agent is not None:
                    agent.carry_out(message, descriptors)
            case _:
                self._channel.refuse(ReceivedMessage(message))

    def _reply(self, reply: Callable[[], Message]) -> None:
        """Reply with what takes some seconds to find, while the workers are served."""
        threading.Thread(target=lambda: self._report(reply()), name="accelerate_nb query", daemon=True).start()

    def _close_group(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def _report(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        # where the other end has gone, that ends the loop
        self._channel.try_send(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _stacks(agent: NodeAgent | None, ranks: Sequence[int]) -> Iterable[tuple[int, str]]:
    return () if agent is None else agent.stacks(ranks).items()


def _collectives(agent: NodeAgent | None, ranks: Sequence[int]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    if agent is not None:
        yield from ((rank, tuple(found)) for rank, found in agent.collectives(ranks).items())


def main() -> None:
    """Begin: `python -m accelerate_nb.launching.node_agent.agent_process CHANNEL`, the descriptor of a connected socket."""
    server = AgentServer(Channel(socket.socket(fileno=int(sys.argv[1]))), SupervisorEngine())
    # an interrupt is for the process that launched, which passes it on
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: server.end())
    warm()
    try:
        server.serve()
    finally:
        cool()


if __name__ == "__main__":
    main()
