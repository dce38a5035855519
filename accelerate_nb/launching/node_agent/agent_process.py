"""The process of a node's agent: it serves one worker group after the other, for the process at the other end of its channel."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from accelerate_nb.devices.cpu import cores
from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.engines.base import Engine
from accelerate_nb.launching.engines.supervisor import SupervisorEngine, cool, warm
from accelerate_nb.launching.node_agent.agent import LONGEST_WAIT, NodeAgent
from accelerate_nb.launching.node_agent.agent_loop import AgentLoop
from accelerate_nb.launching.node_agent.node_facts import facts_of_this_node
from accelerate_nb.launching.node_agent.node_network import NodeNetwork, connect
from accelerate_nb.launching.node_agent.node_sampler import NodeSampler
from accelerate_nb.launching.node_agent.report_sender import ReportSender
from accelerate_nb.transport.channel import (
    Channel,
    ReceivedMessage,
    StreamPair,
)
from accelerate_nb.transport.messages import (
    HEARTBEAT_INTERVAL,
    AgentLost,
    CloseGroup,
    ConnectToPeers,
    GroupClosed,
    Heartbeat,
    KillGroup,
    ListenToPeers,
    Message,
    QueryNode,
    QueryRankCollectives,
    QueryRankStacks,
    RankCollectives,
    RankStacks,
    ReleaseRanks,
    SignalRanks,
    StartWorkers,
    ToRank,
)
from accelerate_nb.transport.rank_info import LOOPBACK
from accelerate_nb.transport.worker_spec import ProcessEnvironment, current_environment

# Where nothing comes from the other end for so long, in seconds, workers are ended: its machine may have slept for a moment, but not
# for ever.
_SILENCE_LIMIT = 60.0


class AgentServer:
    """
    Serves the process at the other end of `channel`; when that has gone, the workers end with it.

    `network` is what this node has of the network between the nodes of a run.

    >>> AgentServer(channel, SupervisorEngine()).serve()
    """

    def __init__(self, channel: Channel, engine: Engine, network: NodeNetwork | None = None) -> None:
        self._channel, self._engine = channel, engine
        self._network = network or NodeNetwork(LOOPBACK)
        self._loop = AgentLoop()
        self._reports = ReportSender(channel)
        self._agent: NodeAgent | None = None
        self._sampler: NodeSampler | None = None
        self._is_ended = False
        self._over = threading.Event()
        self._received_last = time.monotonic()

    def serve(self) -> None:
        """Carry out messages until the other end has gone, or `end` was called."""
        threading.Thread(target=self._send_heartbeats, name="accelerate_nb heartbeat", daemon=True).start()
        with self._loop:
            self._loop.register(self._channel, self._on_channel)
            while not self._is_ended:
                self._guarded(self._serve_once)
            self._over.set()
            self._close_group()
        self._network.close()
        if self._channel.error is not None:
            # the other end shows it, since it can't be told in messages
            sys.stderr.write(f"{self._channel.error}\n")

    def end(self) -> None:
        """End the workers and `serve`; may be called in a signal handler."""
        self._is_ended = True
        self._loop.wake()

    def _serve_once(self) -> None:
        agent = self._agent
        now = time.monotonic()
        self._loop.wait(None if agent is None else self._reports.tick(now, agent.tick(now, LONGEST_WAIT)))
        if agent is not None and time.monotonic() - self._received_last > _SILENCE_LIMIT:
            self._is_ended = True

    def _send_heartbeats(self) -> None:
        while not self._over.wait(HEARTBEAT_INTERVAL):
            # a payload that is under way comes before there is an agent
            if self._agent is not None or self._channel.is_receiving_file:
                self._channel.try_send(Heartbeat())

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
        self._received_last = time.monotonic()
        for received in self._channel.receive_ready():
            try:
                self._carry_out(received)
            finally:
                for descriptor in received.descriptors:
                    os.close(descriptor)
        self._is_ended |= self._channel.is_ended

    def _carry_out(self, received: ReceivedMessage) -> None:
        message, descriptors = received
        agent = self._agent
        match message:
            case StartWorkers() if agent is None:
                self._agent = NodeAgent(self._engine, self._loop, self._reports.send)
                self._start(self._agent, message, descriptors)
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
            case Heartbeat():
                pass
            case ToRank() | SignalRanks() | KillGroup() | ReleaseRanks():
                if agent is not None:
                    agent.carry_out(message, descriptors)
            case _:
                self._reply_about_node(message)

    def _reply_about_node(self, message: Message) -> None:
        match message:
            case QueryNode():
                self._report(facts_of_this_node(self._network.address))
            case ListenToPeers():
                self._report(self._network.listen(message))
            case ConnectToPeers():
                self._reply(lambda: connect(message))
            case _:
                self._channel.refuse(ReceivedMessage(message))

    def _start(self, agent: NodeAgent, request: StartWorkers, descriptors: Sequence[int]) -> None:
        """Start workers with this node's part of their environment; rank 0 gets the socket that listens to the other nodes."""
        request = _on_this_node(request, self._network)
        rank_info = request.processes[0][0].rank_info
        self._reports.begin(rank_info.size)
        sock = self._network.take_socket()
        if sock is None or request.has_store or 0 not in request.ranks:
            agent.start(request, descriptors)
        else:
            agent.start(structs.replace(request, has_store=True), [*descriptors, sock.fileno()])
        if sock is not None:
            sock.close()
        specs = [spec for process in request.processes for spec in process]
        self._sampler = NodeSampler(self._channel.try_send, specs, lambda: agent.pids)

    def _reply(self, reply: Callable[[], Message]) -> None:
        """Reply with what takes some seconds to find, while the workers are served."""
        threading.Thread(target=lambda: self._report(reply()), name="accelerate_nb query", daemon=True).start()

    def _close_group(self) -> None:
        self._reports.flush()
        agent, self._agent = self._agent, None
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            # before the end of the group is reported: the next one may be of another run
            sampler.close()
        if agent is not None:
            agent.close()

    def _report(self, message: Message) -> None:
        # where the other end has gone, that ends the loop
        self._channel.try_send(message)


def _on_this_node(request: StartWorkers, network: NodeNetwork) -> StartWorkers:
    """A request whose workers have the environment of this node, where they are to inherit it, and its interface."""
    threads = max(1, cores() // len(request.ranks))
    node = current_environment({"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}, threads)

    def environment(requested: ProcessEnvironment) -> ProcessEnvironment:
        found = requested.on_node(node) if request.inherits_environment else requested
        return replace(found, environ={**found.environ, **network.variables(found.environ)})

    processes = tuple(
        tuple(replace(spec, process_environment=environment(spec.process_environment)) for spec in specs)
        for specs in request.processes
    )
    return structs.replace(request, processes=processes)


def _stacks(agent: NodeAgent | None, ranks: Sequence[int]) -> Iterable[tuple[int, str]]:
    return () if agent is None else agent.stacks(ranks).items()


def _collectives(agent: NodeAgent | None, ranks: Sequence[int]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    if agent is not None:
        yield from ((rank, tuple(found)) for rank, found in agent.collectives(ranks).items())


def main() -> None:
    """
    Begin: `python -m accelerate_nb.launching.node_agent.agent_process CHANNEL [ADDRESS]`.

    CHANNEL is the descriptor of a connected socket, or `-` for standard input and output; ADDRESS is this node's for others.
    """
    stream = _standard_streams() if sys.argv[1] == "-" else socket.socket(fileno=int(sys.argv[1]))
    network = NodeNetwork(*sys.argv[2:3])
    server = AgentServer(Channel(stream), SupervisorEngine(), network)
    # an interrupt is for the process that launched, which passes it on
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: server.end())
    if "SLURM_STEP_ID" in os.environ:
        # SLURM announces the end of a job to each of its steps: the process that launched decides what becomes of the workers
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            # ignored signals would stay so in all that it starts
            signal.signal(number, lambda *_: None)
    serve_warm(server)


def serve_warm(server: AgentServer) -> None:
    """Serve, with a process at hand that forks workers."""
    warm()
    try:
        server.serve()
    finally:
        cool()


def _standard_streams() -> StreamPair:
    """Standard input and output, which are nobody else's from now on: what is printed goes to standard error."""
    pair = StreamPair(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return pair


if __name__ == "__main__":
    main()
