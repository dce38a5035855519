"""The nodes of a run that is launched on each of them, as one of them sees them: its own ranks, and what the others report of theirs."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from msgspec import structs

from accelerate_nb.errors import LaunchError, ProtocolError
from accelerate_nb.events.event_types import Failure, HeldAt, StateChange, StepProfile
from accelerate_nb.failures.hang_report import StackSnapshot
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.launching.conductor import Nodes
from accelerate_nb.launching.engines.children import Engine
from accelerate_nb.launching.group_runner import AgentFactory, GroupRunner, RunContext
from accelerate_nb.launching.node_agent import node_network
from accelerate_nb.launching.node_agent.agent import Agent, AgentLoop, NodeAgent, Report
from accelerate_nb.launching.node_agent.remote_agent import ChannelReader
from accelerate_nb.launching.planning.placement import LaunchPlan, NodeRoster, Placement
from accelerate_nb.launching.worker_group import Decision, Stop, stronger
from accelerate_nb.rank.step_hold import STOP
from accelerate_nb.transport import messages
from accelerate_nb.transport.channel import Channel, ReceivedMessage, decode, encode
from accelerate_nb.transport.worker_spec import NetworkAddress

# Between two looks at what is waited for, in seconds.
_PAUSE = 0.25
# How long node 0 waits for others whose run ends, and they for it to have read what they sent, in seconds.
_LINGER, _CLOSE_TIMEOUT = 5.0, 2.0
# How long what listens at the endpoint may take to say that it is a node, in seconds.
_GREETING_TIMEOUT = 10.0
# A node from which nothing comes for so long is lost, in seconds. Its notebook may compute meanwhile, which holds back what it sends:
# a process that has ended shows at once, and a machine that is off or cut off within 4 seconds, by the system's own probes.
_SILENCE_LIMIT = 30.0
# The events of ranks that concern other nodes, and what is passed on to a rank elsewhere: nothing that would run code there.
_SHARED_EVENTS = (StateChange, Failure, HeldAt, StepProfile)
_PASSED_ON = (messages.HoldAtStep, messages.ChangeKnobAfter, messages.ProfileSteps)
# The number of an end that is not waited for: what comes later counts no more.
_LAST = 1 << 60
# What ranks report that concerns other nodes.
RankReport = messages.RankEvent | messages.RankExited | messages.AgentLost | messages.ToRank | messages.RunTimedOut

# Takes a message of another node, and the number of a node that has gone with the reason, in the thread that reads.
OnMessage = Callable[[messages.NodeMessage, messages.Message], None]
OnLoss = Callable[[int, str], None]


class NodeExchange:
    """Messages between the nodes of a run: each has a channel to node 0, which passes on what is for others, in one order."""

    # Nodes are numbered in the order in which they came to node 0. Whoever reaches its port can send: nothing that comes is unpickled.

    def __init__(
        self, listener: socket.socket | None = None, sock: socket.socket | None = None, address: str = ""
    ) -> None:
        self._listener, self._socket = listener, sock
        self._channels: dict[int, Channel] = {}
        self._reader, self._lock = ChannelReader(), threading.Lock()
        self._is_closed = False
        # lets others in, on node 0
        self._thread: threading.Thread | None = None
        # this node's address, as the others reach it, and on the others that of node 0
        self.address, self.host = address, ""

    @classmethod
    def joined(cls, host: str, port: int, timeout: float) -> NodeExchange:
        """That of the node which listens there; raises `OSError` where none does, and `LaunchError` for another release."""
        sock = socket.create_connection((host, port), timeout)
        node_network.probe_connection(sock)
        exchange = cls(sock=sock, address=str(sock.getsockname()[0]))
        exchange.host = str(sock.getpeername()[0])
        exchange._channels[0] = channel = Channel(sock, passes_descriptors=False)
        try:
            # node 0 says at once that it is there
            if channel.receive(_GREETING_TIMEOUT) is not None:
                return exchange
        except TimeoutError:
            pass
        except BaseException:
            channel.close()
            raise
        channel.close()
        if channel.error is not None and channel.error.refusal == "version":
            raise LaunchError(
                f"The run at {host}:{port} was to be joined, and node 0 has another release of accelerate_nb: {channel.error}. Install the "
                "same release on all nodes."
            )
        raise ConnectionError("something listens there, and does not answer as a node")

    @property
    def is_host(self) -> bool:
        """Whether this is node 0."""
        return self._listener is not None

    def start(self, on_message: OnMessage, on_loss: OnLoss) -> None:
        """Begin to read, and on node 0 to let others in."""
        self._on_message, self._on_loss = on_message, on_loss
        for number, channel in self._channels.items():
            self._read(number, channel, self.address)
        if self._listener is not None:
            self._listener.settimeout(1.0)
            self._thread = threading.Thread(
                target=self._accept, args=(self._listener,), name="accelerate_nb listener", daemon=True
            )
            self._thread.start()

    def post(self, message: messages.Message, to: int | None = None, attempt: int = 0) -> None:
        """Send a message to a node, or to all, from any thread; it is lost where node 0 has gone, which shows by itself."""
        entry = messages.NodeMessage(0, to, attempt, encode(message))
        if self.is_host and to == 0:
            self._on_message(entry, message)
        elif self.is_host:
            self._pass_on(entry)
        elif (channel := self._channels.get(0)) is not None:
            channel.try_send(entry)

    def close(self) -> None:
        """Leave the others, once they have read what was sent: node 0 waits until they have left, and they until it knows that they do."""
        self._is_closed = True
        deadline = time.monotonic() + (_LINGER if self.is_host else _CLOSE_TIMEOUT)
        with suppress(OSError):
            if self._listener is not None:
                self._listener.shutdown(socket.SHUT_RDWR)
            elif self._socket is not None:
                self._socket.shutdown(socket.SHUT_WR)
        if self._listener is not None:
            self._listener.close()
        while self._channels and time.monotonic() < deadline:
            time.sleep(0.05)
        with self._lock:
            for channel in self._channels.values():
                channel.shutdown()
        self._reader.join()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT)

    def _pass_on(self, entry: messages.NodeMessage) -> None:
        with self._lock:
            for number, channel in self._channels.items():
                if number != entry.sender and entry.to in {None, number}:
                    channel.try_send(entry)

    def _accept(self, listener: socket.socket) -> None:
        numbers = itertools.count(1)
        while not self._is_closed:
            try:
                sock = listener.accept()[0]
                node_network.probe_connection(sock)
            except TimeoutError:
                continue
            except OSError:
                if self._is_closed:
                    return
                # who came has gone, or no more files can be open
                time.sleep(_PAUSE)
                continue
            number, channel = next(numbers), Channel(sock, passes_descriptors=False)
            channel.try_send(messages.Heartbeat())
            with self._lock:
                self._channels[number] = channel
            self._read(number, channel, str(sock.getsockname()[0]))

    def _read(self, number: int, channel: Channel, address: str) -> None:
        self._reader.read(channel, partial(self._take, number, address), partial(self._end, number), _SILENCE_LIMIT)

    # ------------------------------------------------------------------------------------------- the thread that reads

    def _take(self, number: int, address: str, received: ReceivedMessage) -> bool:
        match received.message:
            case messages.NodeMessage() as entry:
                if self.is_host:
                    self.address, entry = address, structs.replace(entry, sender=number)
                    self._pass_on(entry)
                if not self.is_host or entry.to in {None, 0}:
                    # what can't be read is of a stranger
                    with suppress(ProtocolError):
                        self._on_message(entry, decode(entry.body))
            case messages.Heartbeat():
                pass
            case _:
                # of a stranger
                self._channels[number].refuse(received)
        return False

    def _end(self, number: int, reason: str | None) -> None:
        with self._lock:
            if (channel := self._channels.pop(number, None)) is not None:
                channel.close()
        if not self._is_closed:
            self._on_loss(number, reason or "")


class LaunchedNodes(Nodes):
    """The nodes of such a run as this one sees them: what they have to know of each other goes by node 0, and each decides for itself."""

    def __init__(self, exchange: NodeExchange, local: Placement) -> None:
        self._exchange, self.local = exchange, local
        # what was posted to this node, and why others have left or were lost, by their numbers
        self._inbox: queue.SimpleQueue[tuple[int, messages.Message]] = queue.SimpleQueue()
        self._replies: dict[int, queue.SimpleQueue[messages.Message]] = defaultdict(queue.SimpleQueue)
        self._left: dict[int, str] = {}
        self._gone: dict[int, str] = {}
        # what ranks elsewhere report, by attempt
        self._reports: dict[int, queue.SimpleQueue[messages.Message]] = defaultdict(queue.SimpleQueue)
        self._stop: Stop | None = None
        self.wake: Callable[[], None] = lambda: None
        self._on_stop: Callable[[Stop], None] = lambda _: None
        self._network = node_network.NodeNetwork(exchange.address)
        # on node 0, for this attempt
        self._store: socket.socket | None = None
        exchange.start(self._on_message, self._on_loss)

    # the nodes of the newest attempt, and this one's place among them; with the roster it is known once all have come
    joined = messages.RunJoined("", 0, 0, (), (), (), 0, 0, 0.0, None)
    # it meets the others before anything is started again
    retries_at_once = False

    def _take_place(self, joined: messages.RunJoined) -> None:
        self.run, self.roster = joined.run, NodeRoster(joined.names, joined.sizes)
        self.joined = joined
        # the thread that reads did not report the loss of one that went before it knew of this attempt
        for number in {*self._left, *self._gone}:
            self._report_loss(number)

    @property
    def ranks_here(self) -> range:
        return self.roster.ranks_of(self.joined.node_rank)

    @property
    def master(self) -> tuple[NetworkAddress, socket.socket | None]:
        """Where the ranks of this attempt find each other, and on node 0 the socket that listens there."""
        return NetworkAddress(self._exchange.host or self._exchange.address, self.joined.port), self._store

    def placement_here(self, placement: Placement) -> Placement:
        return self.local

    def on_stop_elsewhere(self, request_stop: Callable[[Stop], None]) -> None:
        self._on_stop = request_stop
        # while this node still packed its payload
        if self._stop is not None:
            request_stop(self._stop)

    def variables(self) -> dict[str, str]:
        return node_network.interface_variables(node_network.interface_of(self._exchange.address), os.environ)

    def worker_group(self, plan: LaunchPlan, engine: Engine, run_context: RunContext, number: int) -> GroupRunner:
        return LaunchedGroupRunner(plan, engine, run_context, self)

    def post(self, message: messages.Message, attempt: int) -> None:
        """Let the other nodes know what happened to a rank here."""
        self._exchange.post(message, attempt=attempt)

    def stop(self, how: Stop) -> None:
        """Have all nodes stop; what they know already is not posted again."""
        stop = stronger(self._stop, how)
        if stop != self._stop:
            self._stop = stop
            self._exchange.post(messages.RequestStop(how))

    def reports(self, attempt: int) -> Iterator[messages.Message]:
        """What ranks elsewhere have reported."""
        with suppress(queue.Empty):
            while True:
                yield self._reports[attempt].get_nowait()

    def leave(self, reason: str) -> None:
        self._exchange.post(messages.NodeLeft(reason))
        self._exchange.close()
        self._network.close()

    # ------------------------------------------------------------------------------------------- in the thread that reads

    def _on_message(self, entry: messages.NodeMessage, message: messages.Message) -> None:
        match message:
            case messages.RequestStop(how):
                self._stop = stronger(self._stop, how)
                self._on_stop(how)
            case messages.ListenToPeers() | messages.ConnectToPeers() as query if entry.sender == 0:
                # which may take some seconds
                threading.Thread(target=self._reply, args=(query,), name="accelerate_nb query", daemon=True).start()
            case messages.PeerEndpoint() | messages.PeersReached():
                self._replies[entry.sender].put(message)
            case messages.NodeLeft(reason):
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
        self._inbox.put((number, messages.NodeLeft(reason)))
        self._report_loss(number)

    def _report_loss(self, number: int) -> None:
        if number not in (joined := self.joined).senders:
            return
        node = joined.senders.index(number)
        verb, reason = ("has left", self._left[number]) if number in self._left else ("was lost", self._gone[number])
        ranks = tuple(NodeRoster(joined.names, joined.sizes).ranks_of(node))
        report = messages.AgentLost(ranks, f"{joined.names[node]} {verb}: {reason}", time.time())
        self._reports[joined.attempt].put(report)
        if self._exchange.is_host:
            self.post(report, joined.attempt)

    def _reply(self, query: messages.ListenToPeers | messages.ConnectToPeers) -> None:
        reply = (
            self._network.listen(query) if isinstance(query, messages.ListenToPeers) else node_network.connect(query)
        )
        self._exchange.post(reply, 0)

    def _next(self) -> tuple[int, messages.Message] | None:
        """The next message to this node, waited for a moment."""
        try:
            return self._inbox.get(timeout=_PAUSE)
        except queue.Empty:
            return None


class LaunchedGroupRunner(GroupRunner):
    """Runs this node's part of a plan, in a group of all ranks: those elsewhere as their nodes report them."""

    # So every node comes to the same decisions by itself: who failed first, after which step all stop, when all have returned.

    def __init__(self, plan: LaunchPlan, engine: Engine, run_context: RunContext, nodes: LaunchedNodes) -> None:
        self._nodes = nodes
        # what came before this group was there to take it
        self._early: list[messages.Message] = []
        sizes = nodes.roster.sizes
        # a node that has come late does not count its attempts itself
        number, place = nodes.joined.attempt, nodes.joined.node_rank

        def agent_here(loop: AgentLoop, report: Report) -> NodeAgent:
            def shared(message: messages.Message, descriptors: Sequence[int]) -> None:
                event = message.event if isinstance(message, messages.RankEvent) else None
                if isinstance(message, (messages.RankExited, messages.AgentLost)) or isinstance(event, _SHARED_EVENTS):
                    nodes.post(message, number)
                report(message, descriptors)

            return NodeAgent(engine, loop, shared)

        agents: list[AgentFactory] = [partial(RanksElsewhere, self, partial(nodes.post, attempt=number))] * len(sizes)
        agents[place] = agent_here
        master, store = nodes.master
        plan = replace(plan, size=sum(sizes), node_sizes=sizes)
        super().__init__(plan, agents, run_context, number, master, store=store)

    def follow(self) -> tuple[RankResult, ...]:
        """Run the workers to their end; returns a result for every rank of the run, without values for those of other nodes."""
        self._nodes.wake = self._loop.wake
        try:
            return super().follow()
        finally:
            self._nodes.wake = lambda: None

    def stop(self, how: Stop) -> None:
        self._nodes.stop(how)
        super().stop(how)

    def reports(self) -> Iterator[messages.Message]:
        """What other nodes have reported, as far as this one is ready to take it."""
        waiting, self._early = self._early, []
        for message in (*waiting, *self._nodes.reports(self._number)):
            match message:
                case messages.RankEvent(event=HeldAt(number=number)) if (
                    number == STOP and self.group.negotiation is None
                ):
                    # its node knows already that all are to stop
                    self._early.append(message)
                case messages.AgentLost(ranks) if all(rank in self.group.reported for rank in ranks):
                    # it left after its ranks had ended
                    continue
                case messages.RankEvent(rank) | messages.RankExited(rank) if rank in self.group.lost_ranks:
                    # its node goes on without the others for a moment
                    continue
                case messages.RunTimedOut():
                    self._run_context.deadline = self.group.deadline = time.monotonic()
                case messages.ToRank(rank, content):
                    if not isinstance(content, _PASSED_ON) or rank not in self._nodes.ranks_here:
                        continue
                    if isinstance(content, messages.ProfileSteps):
                        content = structs.replace(content, folder=str(self._run_context.record.folder))
                    self.send(rank, content)
                case _:
                    yield message

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        if self.group.cause == "timed_out" and self.timed_out is None:
            self._nodes.post(messages.RunTimedOut(), self._number)
        super()._carry_out(decisions)

    def _end_deadlock(self, snapshot: StackSnapshot) -> None:
        """End the group, unless ranks elsewhere, whose stacks are not known here, may still be at work."""
        elsewhere = set(range(self._plan.size)) - set(self._nodes.ranks_here)
        if elsewhere <= self.group.reported.keys():
            super()._end_deadlock(snapshot)


class RanksElsewhere(Agent):
    """The ranks of another node, of which is known what their node reports; their ends are not waited for."""

    has_outcomes = False

    def __init__(
        self, runner: LaunchedGroupRunner, pass_on: Callable[[messages.Message], None], _loop: AgentLoop, report: Report
    ) -> None:
        self._runner, self._pass_on, self._report = runner, pass_on, report
        self._code: int | None = None

    def start(self, request: messages.StartWorkers, descriptors: Sequence[int]) -> None:
        self.ranks = request.ranks

    def tick(self, now: float, timeout: float) -> float:
        """Report what has come, and the ends once this node's ranks are to end."""
        for message in self._runner.reports():
            self._report(message, ())
        if self._code is not None:
            for rank in self.ranks:
                if rank not in self._runner.group.exit_codes:
                    self._report(messages.RankExited(rank, _LAST, self._code, time.time(), killed=self._code < 0), ())
        return timeout

    def carry_out(self, message: messages.Message, descriptors: Sequence[int] = ()) -> None:
        """Pass on what is for a rank; the rest is decided there, too."""
        match message:
            case messages.ToRank(_, content) if isinstance(content, messages.StopAt) or (
                isinstance(content, messages.HoldAtStep) and content.number == STOP
            ):
                # so decides its own node, too
                pass
            case messages.ToRank():
                self._pass_on(message)
            case messages.KillGroup():
                self._code = -int(signal.SIGKILL)
            case messages.ReleaseRanks() if self._code is None:
                self._code = 0
