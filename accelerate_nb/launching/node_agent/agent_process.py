"""The process of a node's agent: it serves one worker group after the other, for the process at the other end of its channel."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from types import FrameType
from typing import cast

from msgspec import structs

from accelerate_nb.config.environment import USE_CPU
from accelerate_nb.devices.cpu import cores
from accelerate_nb.devices.probe import probe
from accelerate_nb.devices.usage import HostGauge
from accelerate_nb.errors import ConfigurationError, LaunchError, ProtocolError
from accelerate_nb.events.event_types import DeviceSample, LogLine, MemoryUse, Metric, Progress, StepBreakdown
from accelerate_nb.failures.hang_report import StackSnapshot
from accelerate_nb.launching.engines.children import Engine
from accelerate_nb.launching.engines.supervisor import cool, supervised_workers, warm
from accelerate_nb.launching.node_agent.agent import LONGEST_WAIT, AgentLoop, NodeAgent
from accelerate_nb.launching.node_agent.node_network import NodeNetwork, connect, facts_of_this_node, probe_connection
from accelerate_nb.launching.resource_monitor import device_samples, gauge_of
from accelerate_nb.transport import messages
from accelerate_nb.transport.channel import Channel, ReceivedMessage, StreamPair
from accelerate_nb.transport.handshake import prove_token
from accelerate_nb.transport.worker_spec import LOOPBACK, WorkerSpec, current_environment

# How often the load is sent after workers started, for the first times and from then on, in seconds.
_FIRST_SAMPLE, _QUICK_SAMPLES, _BETWEEN_SAMPLES = 1.0, 3, 5.0
# A sample that is being sent may wait for its reader, which has gone or doesn't read, in seconds.
_CLOSE_TIMEOUT = 2.0
# Output and measurements are sent at most this often, in seconds: a panel shows them no more often.
BETWEEN_SENDS = 0.1
# In larger worlds less often: what the ranks of many nodes write is the work of one process.
_RANKS_AT_ONCE = 4096
_LONGEST_BETWEEN = 0.5
# More bytes of output don't wait: they would fill the memory, or a message.
_MOST_OUTPUT = 2 << 20
_CAN_WAIT = (messages.RankOutput, DeviceSample, MemoryUse, Metric, Progress, StepBreakdown)
# Where nothing comes from the other end for so long, in seconds, workers are ended: its machine may have slept for a moment, but not
# for ever.
_SILENCE_LIMIT = 60.0
_TOKEN_SIZE = 16
_TEXT = re.compile(rf"(?P<token>[0-9a-f]{{{2 * _TOKEN_SIZE}}})@(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^@:\s]+)):(?P<port>\d+)")
# How long the notebook may take to prove the token, and to grant the membership, in seconds.
_JOIN_TIMEOUT = 10.0


class NodeSampler:
    """The thread that sends the load of a node every few seconds, and that of the devices of its ranks, until it is closed."""

    def __init__(
        self,
        send: Callable[[messages.NodeLoad], object],
        specs: Sequence[WorkerSpec],
        pids: Callable[[], Mapping[int, int]],
        first: float = _FIRST_SAMPLE,
    ) -> None:
        self._send, self._specs, self._pids, self._first = send, specs, pids, first
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="accelerate_nb samples", daemon=True)
        self._thread.start()

    def close(self, timeout: float = _CLOSE_TIMEOUT) -> None:
        """End it; nothing more is sent from then on, but what is on its way for longer than `timeout` seconds."""
        self._over.set()
        self._thread.join(timeout)

    def _sample(self) -> None:
        host, rank_info = HostGauge(()), self._specs[0].rank_info
        ranks = range(rank_info.rank, rank_info.rank + len(self._specs))
        environment = self._specs[0].process_environment.environ
        kind = "cpu" if environment.get(USE_CPU) == "true" else probe().kind
        waits = chain([self._first] * _QUICK_SAMPLES, repeat(_BETWEEN_SAMPLES))
        with closing(gauge_of(kind, len(ranks), environment)) as gauge:
            while not self._over.wait(next(waits)):
                load = host.sample()
                devices = tuple(device_samples(gauge, ranks, self._pids(), load))
                self._send(messages.NodeLoad(structs.replace(load, node=rank_info.node_rank), devices))


class ReportSender:
    """Sends reports in their order: output and measurements wait up to `BETWEEN_SENDS`, unless nothing was sent for so long; others don't."""

    def __init__(self, channel: Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._clock = channel, clock
        self._collected: list[messages.Message] = []
        self._output = 0
        self._next = float("-inf")
        self._between = BETWEEN_SENDS

    def begin(self, world_size: int) -> None:
        """Reports of a world of so many ranks follow. In a large one, what a rank writes meanwhile becomes one report."""
        self._between = min(max(BETWEEN_SENDS, world_size / _RANKS_AT_ONCE), _LONGEST_BETWEEN)

    def send(self, report: messages.Message, descriptors: Sequence[int] = ()) -> None:
        """Send a report, at the latest in a later `tick`; its descriptors are closed."""
        if descriptors:
            self.flush()
            self._channel.try_send(report, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            return
        self._collected.append(report)
        if isinstance(report, messages.RankOutput):
            self._output += len(report.raw)
        event = report.event if isinstance(report, messages.RankEvent) else None
        if self._output > _MOST_OUTPUT or not isinstance(report if event is None else event, _CAN_WAIT):
            self.flush()

    def tick(self, now: float, timeout: float) -> float:
        """Send what is due, on the clock; returns the seconds until something is, at most `timeout`."""
        if not self._collected:
            return timeout
        if now >= self._next:
            self.flush()
            return timeout
        return min(timeout, self._next - now)

    def flush(self) -> None:
        """Send what has waited."""
        reports, self._collected, self._output = self._collected, [], 0
        if self._between > BETWEEN_SENDS:
            reports = _joined(reports)
        if reports:
            self._send(reports)
            self._next = self._clock() + self._between

    def _send(self, reports: Sequence[messages.Message]) -> None:
        """Send reports in one message or, where that is too long, in one each; a line stands for a report that is too long itself."""
        report = reports[0]
        if len(reports) > 1:
            report = messages.RankReports(cast("tuple[messages.RankReport, ...]", tuple(reports)))
        try:
            # where the other end has gone, that ends the loop
            self._channel.try_send(report)
        except ProtocolError as error:
            if len(reports) > 1:
                for part in reports:
                    self._send([part])
            elif isinstance(report, messages.NumberedReport):
                text = f"… left out here: {error}"
                line = LogLine(report.rank, "stdout", text, time.time(), meaning="warning")
                self._send([messages.RankOutput(report.rank, report.number, f"{text}\n".encode(), (line,))])


def _joined(reports: Sequence[messages.Message]) -> list[messages.Message]:
    """Reports in their order, where the outputs of a rank between which it reported nothing else are one: it has the number of the last."""
    found: list[messages.Message] = []
    # where the last report of each rank is
    places: dict[int | None, int] = {}
    for report in reports:
        rank = getattr(report, "rank", None)
        former = found[places[rank]] if rank in places else None
        if isinstance(report, messages.RankOutput) and isinstance(former, messages.RankOutput) and not report.left_out:
            raw, lines = former.raw + report.raw, former.lines + report.lines
            found[places[rank]] = structs.replace(former, number=report.number, raw=raw, lines=lines)
        else:
            places[rank] = len(found)
            found.append(report)
    return found


def _rank_stacks(query: messages.QueryRankStacks, agent: NodeAgent | None) -> messages.RankStacks:
    found = agent.snapshot(query.ranks) if agent else StackSnapshot({}, {})
    collectives = {str(rank): tuple(entries) for rank, entries in found.collectives.items()}
    return messages.RankStacks(query.number, {str(rank): text for rank, text in found.replies.items()}, collectives)


class AgentServer:
    """Serves the process at the other end of `channel`; when that has gone, the workers end with it."""

    def __init__(
        self, channel: Channel, network: NodeNetwork | None = None, engine: Engine = supervised_workers
    ) -> None:
        # what can't be sent is lost: where the other end has gone, that ends the loop
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
        with closing(self._loop):
            self._loop.register(self._channel, self._on_channel)
            while not self._is_ended:
                agent, now = self._agent, time.monotonic()
                try:
                    self._loop.wait(None if agent is None else self._reports.tick(now, agent.tick(now, LONGEST_WAIT)))
                except (LaunchError, OSError) as error:
                    # no workers can be started, or followed: they are lost
                    if (agent := self._agent) is None:
                        raise
                    self._close_group()
                    self._channel.try_send(messages.AgentLost(agent.ranks, str(error), time.time()))
                if agent is not None and time.monotonic() - self._received_last > _SILENCE_LIMIT:
                    self._is_ended = True
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

    def _send_heartbeats(self) -> None:
        while not self._over.wait(messages.HEARTBEAT_INTERVAL):
            # a payload that is under way comes before there is an agent
            if self._agent is not None or self._channel.is_receiving_file:
                self._channel.try_send(messages.Heartbeat())

    def _on_channel(self) -> None:
        self._received_last = time.monotonic()
        for received in self._channel.receive_ready():
            try:
                self._carry_out(received)
            finally:
                for descriptor in received.descriptors:
                    os.close(descriptor)
        if self._channel.is_ended:
            # never back to false: a signal handler sets it, too
            self._is_ended = True

    def _carry_out(self, received: ReceivedMessage) -> None:
        message, descriptors = received
        agent = self._agent
        match message:
            case messages.StartWorkers() if agent is None:
                self._agent = NodeAgent(self._engine, self._loop, self._reports.send)
                self._start(self._agent, message, descriptors)
            case messages.CloseGroup():
                if agent is not None:
                    agent.drain()
                self._close_group()
                self._channel.try_send(messages.GroupClosed())
            case messages.QueryRankStacks():
                self._reply(partial(_rank_stacks, message, agent))
            case messages.Heartbeat():
                pass
            case messages.ToRank() | messages.SignalRanks() | messages.KillGroup() | messages.ReleaseRanks():
                if agent is not None:
                    agent.carry_out(message, descriptors)
            case _:
                self._reply_about_node(message)

    def _reply_about_node(self, message: messages.Message) -> None:
        match message:
            case messages.QueryNode():
                self._channel.try_send(facts_of_this_node(self._network.address))
            case messages.ListenToPeers():
                self._channel.try_send(self._network.listen(message))
            case messages.ConnectToPeers():
                self._reply(lambda: connect(message))
            case _:
                self._channel.refuse(ReceivedMessage(message))

    def _start(self, agent: NodeAgent, request: messages.StartWorkers, descriptors: Sequence[int]) -> None:
        """Start workers with this node's part of their environment; rank 0 gets the socket that listens to the other nodes."""
        threads = max(1, cores() // len(request.ranks))
        node = current_environment({"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}, threads)

        def on_this_node(spec: WorkerSpec) -> WorkerSpec:
            found = spec.process_environment
            found = found.on_node(node) if request.inherits_environment else found
            environ = {**found.environ, **self._network.variables(found.environ)}
            return replace(spec, process_environment=replace(found, environ=environ))

        request = structs.replace(request, specs=tuple(map(on_this_node, request.specs)))
        self._reports.begin(request.specs[0].rank_info.size)
        sock = self._network.take_socket()
        if sock is None or request.has_store or 0 not in request.ranks:
            agent.start(request, descriptors)
        else:
            agent.start(structs.replace(request, has_store=True), [*descriptors, sock.fileno()])
        if sock is not None:
            sock.close()
        self._sampler = NodeSampler(self._channel.try_send, request.specs, lambda: agent.pids)

    def _reply(self, reply: Callable[[], messages.Message]) -> None:
        """Reply with what takes some seconds to find, while the workers are served."""
        threading.Thread(
            target=lambda: self._channel.try_send(reply()), name="accelerate_nb query", daemon=True
        ).start()

    def _close_group(self) -> None:
        self._reports.flush()
        agent, self._agent = self._agent, None
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            # before the end of the group is reported: the next one may be of another run
            sampler.close()
        if agent is not None:
            agent.close()


def main() -> None:
    """Begin: `python -m ... CHANNEL [ADDRESS]`: a connected socket's descriptor, or `-` for standard input and output; this node for others."""
    stream: socket.socket | StreamPair
    if sys.argv[1] == "-":
        # nobody else's from now on: what is printed goes to standard error
        stream = StreamPair(os.dup(0), os.dup(1))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        os.close(nothing)
    else:
        stream = socket.socket(fileno=int(sys.argv[1]))
    server = AgentServer(Channel(stream), NodeNetwork(*sys.argv[2:3]))
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


def new_token() -> str:
    """A token of 128 random bits, as hexadecimal digits."""
    return secrets.token_hex(_TOKEN_SIZE)


@dataclass(frozen=True, slots=True)
class JoinTicket:
    """A token, which no `repr` shows, and where a notebook waits for machines; as a text TOKEN@HOST:PORT."""

    token: str = field(repr=False)
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.token}@{self.endpoint}"

    @classmethod
    def parse(cls, text: str) -> JoinTicket:
        """The ticket of a text; raises `ConfigurationError`, which does not repeat the token."""
        found = _TEXT.fullmatch(text.strip())
        if found is None or not 0 < int(found["port"]) < 65536:
            raise ConfigurationError(
                f"A text of {len(text.strip())} characters was given, which is no TOKEN@HOST:PORT. Copy the whole line that the notebook "
                "has printed: accelerate-nb join TOKEN@HOST:PORT."
            )
        return cls(found["token"], found["v6"] or found["host"], int(found["port"]))

    @property
    def endpoint(self) -> str:
        """The address and the port as a person writes them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def key(self) -> bytes:
        """The token's bytes."""
        return bytes.fromhex(self.token)


class JoinedAgent:
    """This machine as a node of the notebook of a ticket, under a name."""

    def __init__(self, ticket: JoinTicket, name: str) -> None:
        try:
            sock = socket.create_connection((ticket.host, ticket.port), _JOIN_TIMEOUT)
        except OSError as error:
            raise LaunchError(
                f"Joining the notebook at {ticket.endpoint} was requested, and nothing can be reached there: {error.strerror or error}. A "
                "notebook listens only while a launch waits for machines: launch again there, or let its firewall pass that port."
            ) from None
        try:
            prove_token(sock, ticket.key, _JOIN_TIMEOUT)
            probe_connection(sock)
        except (ProtocolError, OSError) as error:
            sock.close()
            raise LaunchError(
                f"Joining the notebook at {ticket.endpoint} was requested, and this machine was not let in: {error}. Copy the newest line that "
                "the notebook has printed."
            ) from None
        self._address = str(sock.getsockname()[0])
        self._channel = Channel(sock)
        try:
            self.name = self._channel.request(
                messages.RequestMembership(name), messages.MembershipGranted, _JOIN_TIMEOUT
            ).name
        except OSError:
            self._channel.close()
            raise LaunchError(
                f"Joining the notebook at {ticket.endpoint} as {name!r} was requested, and it has closed the connection: it waits no "
                "more, has another release of accelerate_nb, or takes no such name. Launch again there, with the same release, or pass "
                "another --name."
            ) from None
        except BaseException:
            self._channel.close()
            raise

    def serve(self) -> bool:
        """Serve in the main thread; whether the notebook has ended it, rather than a signal of this machine."""
        server = AgentServer(self._channel, NodeNetwork(self._address))
        received: list[int] = []

        def end(number: int, _: FrameType | None) -> None:
            received.append(number)
            server.end()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, end)
        with closing(self._channel):
            serve_warm(server)
        return not received


if __name__ == "__main__":
    main()
