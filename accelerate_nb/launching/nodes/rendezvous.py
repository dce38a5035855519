"""The nodes of a run that is launched on each of them: they come to a rendezvous, and again before each further attempt."""

from __future__ import annotations

import queue
import socket
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

from msgspec import structs

from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.devices.probe import probe
from accelerate_nb.errors import AccelerateNbError, LaunchError
from accelerate_nb.events.terminal_lines import plain_name
from accelerate_nb.launching.node_agent import node_network
from accelerate_nb.launching.nodes.launched_nodes import LaunchedNodes, NodeExchange
from accelerate_nb.launching.nodes.node_placement import fixed_mesh, leave_out
from accelerate_nb.launching.nodes.rendezvous_settings import (
    RendezvousSettings,
    check_name,
    hosts,
    listen,
    local_placement,
)
from accelerate_nb.launching.planning.placement import Placement, check_training
from accelerate_nb.transport import messages
from accelerate_nb.transport.channel import Reply

# Between two tries to reach node 0, in seconds.
_PAUSE = 0.25
_CONNECT_TIMEOUT = 5.0
# Told to a node that comes late.
_UNDER_WAY = "a run is under way there, of which all nodes have come already"
_LATE = "a run is under way there, in which this node takes part when it starts again"
# Strangers may send any number of them.
_MOST_OBJECTIONS = 5
# What is shown of runs of which each node shows its own part.
_ALL_IN_ONE_PANEL = (
    "each node shows its own ranks; hosts=, engine='slurm', 'ray' or 'join' show those of all in one panel"
)


class _JoinedNode:
    """A node that has come, or node 0 itself, and carries out a request; what it replies comes into a queue."""

    def __init__(
        self, name: str, number: int, exchange: NodeExchange, replies: queue.SimpleQueue[messages.Message]
    ) -> None:
        self.name, self._number, self._exchange, self._replies = name, number, exchange, replies

    def request(self, message: messages.Message, reply_class: type[Reply], timeout: float) -> Reply:
        """Send a message, and wait for its reply; raises `LaunchError` where none comes."""
        self._exchange.post(message, self._number)
        deadline = time.monotonic() + timeout
        with suppress(queue.Empty):
            while True:
                reply = self._replies.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(reply, reply_class):
                    return reply
        raise LaunchError(
            f"A run on {self.name} was requested, and nothing came from it within {timeout:g} s. Launch again on each node."
        )


class HostNodes(LaunchedNodes):
    """Node 0, to which the others connect: it waits for the others, compares what they run, and gives each its place."""

    def __init__(
        self, listener: socket.socket, local: Placement, settings: RendezvousSettings, config: RunConfig
    ) -> None:
        self._bound, self._family = str(listener.getsockname()[0]), listener.family
        # others may reach this node at another one, and may come later
        address = node_network.NodeNetwork().address if self._bound in {"0.0.0.0", "::"} else self._bound
        self._launching, self._mesh = config.launching, fixed_mesh(config.training)
        self._facts = node_network.facts_of_this_node(settings.host)
        # those that have come by their numbers, with their ranks among nodes, and those that wait for a place
        self._members: dict[int, tuple[int, messages.JoinRun]] = {}
        self._waiting: dict[int, messages.JoinRun] = {}
        self._ready: dict[int, int] = {}
        self._objections: list[str] = []
        super().__init__(NodeExchange(listener, address=address), local, settings)

    def meet(self) -> None:
        """Wait for all nodes, or for as many as are needed and a while for others; raises `LaunchError`, which those that came get, too."""
        settings = self._settings
        notice, deadline, last_call = node_network.WaitNotice(), time.monotonic() + settings.timeout, None
        try:
            while True:
                count, now = len(self._members) + 1, time.monotonic()
                if count < (settings.min_nodes or settings.nodes):
                    last_call = None
                    if now > deadline:
                        there = ", ".join([node_name(0, self._facts.host), *map(self._name, sorted(self._members))])
                        refused = f"; others were refused: {'; '.join(self._objections)}" if self._objections else ""
                        raise LaunchError(
                            f"A run of {settings.nodes} nodes was requested, and after {settings.timeout:g} s only {count} had come to "
                            f"{settings.endpoint} ({there}{refused}): {self._missing()} did not. To go on, {settings.advice}."
                        )
                elif last_call is None:
                    last_call = now + settings.last_call
                if count == settings.nodes or (last_call is not None and now >= last_call):
                    break
                most = settings.timeout if last_call is None else settings.last_call
                notice.say(
                    f"{count} of {settings.nodes} nodes are there; waiting at {settings.endpoint} for {self._missing()}, up to {most:g} s"
                )
                self._next()
                self._admit()
            self._check_reach()
            self._begin(0, "")
        except (AccelerateNbError, KeyboardInterrupt) as error:
            self.leave(str(error) or "node 0 was interrupted while it waited for other nodes. Launch again")
            raise

    def next_nodes(self, lost: Collection[int], is_stopped: Callable[[], bool]) -> str:
        """Wait for those that are left, take in those that wait, and begin another attempt."""
        attempt = self.joined.attempt + 1
        deadline, text = time.monotonic() + self._settings.timeout, self._without_lost()
        while not all(self._ready.get(number) == attempt for number in self._members):
            if is_stopped():
                return ""
            if time.monotonic() > deadline:
                raise LaunchError("the other nodes did not come to another attempt. Launch it again on each node")
            self._next()
            text = self._without_lost()
        if came := self._take_waiting():
            ranks = self.local.size + sum(request.processes for _, request in self._members.values())
            came_too = f"{' and '.join(came)} {'has' if len(came) == 1 else 'have'} come; {ranks} ranks start again"
            text = f"{text}; {came_too}" if text else came_too
        self._begin(attempt, text)
        return text

    def leave(self, reason: str) -> None:
        """Take part no more; where nothing has begun, those that have come get to know why. Later ones may be of a next run, and try again."""
        if not self.roster.names:
            self._exchange.post(messages.RunRefused(reason))
        super().leave(reason)
        if self._store is not None:
            self._store.close()

    # ------------------------------------------------------------------------------------------------------ who comes

    def _on_message(self, entry: messages.NodeMessage, message: messages.Message) -> None:
        number = entry.sender
        match message:
            case messages.JoinRun() as request:
                if reason := self._objection(request):
                    self._exchange.post(messages.RunRefused(reason), number)
                    objection = plain_name(reason.replace("this node", "that node"))
                    if objection not in self._objections and len(self._objections) < _MOST_OBJECTIONS:
                        self._objections.append(objection)
                        node_network.print_notice(f"a node came, and was refused: {objection}")
                    return
                self._waiting[number] = request
                if self.roster.names:
                    self._exchange.post(messages.ShowText(_LATE if self._may_grow else _UNDER_WAY), number)
            case messages.NodeReady(attempt):
                self._ready[number] = attempt
        super()._on_message(entry, message)

    def _lose(self, number: int, reason: str) -> None:
        self._waiting.pop(number, None)
        if not self.roster.names:
            self._members.pop(number, None)
        super()._lose(number, reason)

    @property
    def _may_grow(self) -> bool:
        return self._settings.min_nodes is not None and not self._mesh

    def _admit(self) -> None:
        """Have those that wait take part, as far as there is a place."""
        for number, request in list(self._waiting.items()):
            taken = {rank: other for other, (rank, _) in self._members.items()}
            rank = request.node_rank if request.node_rank is not None else next(iter(self._free), None)
            del self._waiting[number]
            if rank is None:
                continue
            if rank in taken:
                name = self._name(taken[rank])
                reason = f"node_rank={rank} was given, and {name} has joined as that already. Pass another on each node"
                self._exchange.post(messages.RunRefused(reason), number)
                continue
            self._members[number] = rank, request
            named = sorted((rank, self._name(other), request.facts) for other, (rank, request) in self._members.items())
            node_network.check_versions(self._facts, {name: facts for _, name, facts in named})

    def _take_waiting(self) -> list[str]:
        """Have those that have come meanwhile take part, where they fit; returns their names."""
        came = []
        for number, request in list(self._waiting.items()):
            if not self._may_grow or not self._free:
                break
            del self._waiting[number]
            self._members[number] = self._free[0], request
            try:
                node_network.check_versions(self._facts, {(name := self._name(number)): request.facts})
                self._check_reach()
            except LaunchError as error:
                del self._members[number]
                self._exchange.post(messages.RunRefused(str(error)), number)
            else:
                came.append(name)
        return came

    def _without_lost(self) -> str:
        """Leave out those that were lost, in a sentence; raises `LaunchError` where there may not be fewer, or one has left, which ends the run."""
        numbers, names = self.joined.senders, self.roster.names
        for node, number in enumerate(numbers):
            if number in self._left:
                raise LaunchError(f"{names[node]} has left it: {self._left[number]}")
        lost = [node for node, number in enumerate(numbers) if number in self._gone]
        change = leave_out(self.roster, lost, self._settings.min_nodes)
        if lost and change is None:
            gone = " and ".join(names[node] for node in lost)
            raise LaunchError(f"{gone} {'was' if len(lost) == 1 else 'were'} lost. Launch it again on each node")
        for node in lost:
            self._members.pop(numbers[node], None)
        return "" if change is None else change[1]

    def _check_reach(self) -> None:
        """Check that this node and those that have come can connect to each other; raises `LaunchError`."""
        if not self._members:
            return
        self._network.address = self._exchange.address
        named = [(node_name(0, self._facts.host), 0), *((self._name(number), number) for number in self._members)]
        nodes = [_JoinedNode(name, number, self._exchange, self._replies[number]) for name, number in named]
        node_network.check_reach(
            nodes,
            node_network.of_all(lambda node: node_network.endpoint_of(node, messages.ListenToPeers(0, ())), nodes),
        )

    # ------------------------------------------------------------------------------------------------- the next attempt

    def _begin(self, attempt: int, text: str) -> None:
        """Give each node its place, in the order of their ranks."""
        if self._store is not None:
            self._store.close()
        self._store = socket.create_server((self._bound, 0), family=self._family, backlog=4096)
        order = sorted(self._members, key=lambda number: self._members[number][0])
        if not self.roster.names:
            # where fewer came than could, one that went may have left a gap
            self._members = {number: (rank, self._members[number][1]) for rank, number in enumerate(order, 1)}
        joined = messages.RunJoined(
            run=self.run or uuid.uuid4().hex,
            attempt=attempt,
            node_rank=0,
            senders=(0, *order),
            names=(node_name(0, self._facts.host), *map(self._name, order)),
            sizes=(self.local.size, *(self._members[number][1].processes for number in order)),
            port=self._store.getsockname()[1],
            max_restarts=self._launching.max_restarts,
            restart_delay=self._launching.restart_delay,
            timeout=self._launching.timeout,
            text=text,
        )
        self._take_place(joined)
        for node_rank, number in enumerate(order, 1):
            self._exchange.post(structs.replace(joined, node_rank=node_rank), number)

    def _name(self, number: int) -> str:
        rank, request = self._members[number]
        return node_name(rank, request.facts.host)

    @property
    def _free(self) -> list[int]:
        """The ranks among nodes that none has yet."""
        taken = {rank for rank, _ in self._members.values()}
        return [rank for rank in range(1, self._settings.nodes) if rank not in taken]

    def _missing(self) -> str:
        if self._settings.node_rank is None:
            return f"{len(self._free)} more"
        return " and ".join(f"node {rank}" for rank in self._free)

    def _objection(self, request: messages.JoinRun) -> str:
        """Why a node can't be one of this run; empty where it can."""
        settings = self._settings
        expected: dict[str, tuple[object, ...]] = {
            "rdzv_id": (request.run_id, settings.run_id),
            "num_nodes": (request.nodes, settings.nodes),
            "rdzv_backend": tuple(
                "c10d" if rank is None else "static" for rank in (request.node_rank, settings.node_rank)
            ),
        }
        for name, (theirs, ours) in expected.items():
            if theirs != ours:
                return f"{name}={theirs!r} was given on this node, and {name}={ours!r} on node 0. Pass the same on all nodes"
        if request.kind != self.local.kind:
            return (
                f"this node computes on {request.kind}, and node 0 on {self.local.kind}: ranks of one run compute on devices of one "
                "kind. Pass cpu=True on all nodes"
            )
        if request.node_rank is not None and not 0 < request.node_rank < settings.nodes:
            return f"node_rank={request.node_rank} was given, and nodes beside node 0 are 1 to {settings.nodes - 1}"
        return ""


class MemberNodes(LaunchedNodes):
    """A node beside node 0."""

    @classmethod
    def joining(cls, local: Placement, settings: RendezvousSettings) -> MemberNodes:
        """Join the run, as soon as node 0 is there, and wait for all nodes; raises `LaunchError` after the timeout, or where it is refused."""
        notice, deadline, trouble = node_network.WaitNotice(), time.monotonic() + settings.timeout, ""
        while (left := deadline - time.monotonic()) > 0:
            try:
                exchange = NodeExchange.joined(settings.host, settings.port, min(_CONNECT_TIMEOUT, left))
            except OSError as error:
                trouble = error.strerror or str(error)
                notice.say(f"waiting for node 0 at {settings.endpoint} ({trouble}), up to {settings.timeout:g} s")
            else:
                notice.say(f"node 0 is there, at {settings.endpoint}; waiting for the other nodes")
                nodes = cls(exchange, local, settings)
                try:
                    trouble = nodes._wait_for_place(deadline, notice)
                except BaseException:
                    nodes.leave("it waits no more")
                    raise
                if not trouble:
                    return nodes
                nodes.leave(trouble)
            time.sleep(_PAUSE)
        raise LaunchError(
            f"A run of {settings.nodes} nodes was requested, and after {settings.timeout:g} s there was no run for this node at "
            f"{settings.endpoint}: {trouble}. To go on, {settings.advice}."
        )

    def next_nodes(self, lost: Collection[int], is_stopped: Callable[[], bool]) -> str:
        """Wait for this node's place in another attempt."""
        attempt = self.joined.attempt + 1
        self._exchange.post(messages.NodeReady(attempt), 0)
        deadline = time.monotonic() + self._settings.timeout
        while time.monotonic() < deadline:
            if is_stopped():
                return ""
            for known, verb in ((self._left, "has left it"), (self._gone, "was lost")):
                if 0 in known:
                    raise LaunchError(f"{self.roster.names[0]} {verb}: {known[0]}")
            match self._next():
                case 0, messages.RunJoined() as joined if joined.attempt == attempt and self._take(joined):
                    return joined.text
        raise LaunchError("node 0 did not begin another attempt. Launch it again on each node")

    def _wait_for_place(self, deadline: float, notice: node_network.WaitNotice) -> str:
        """Wait until all have come; returns why there is no run here yet, and raises `LaunchError` where node 0 refuses this node."""
        settings, why = self._settings, "not all nodes have come"
        request = messages.JoinRun(
            settings.run_id,
            settings.nodes,
            settings.node_rank,
            self.local.size,
            self.local.kind,
            node_network.facts_of_this_node(""),
        )
        self._exchange.post(request, 0)
        while time.monotonic() < deadline:
            match self._next():
                case 0, messages.RunJoined() as joined if self._take(joined):
                    return ""
                case 0, messages.RunRefused(reason):
                    raise LaunchError(
                        f"A run of {settings.nodes} nodes was requested, and node 0 at {settings.endpoint} refuses this one: {reason}."
                    )
                case 0, messages.ShowText(text):
                    why = text
                    notice.say(f"{why}; waiting at {settings.endpoint} up to {settings.timeout:g} s")
                case 0, messages.NodeLeft(reason):
                    return reason
        return why

    def _take(self, joined: messages.RunJoined) -> bool:
        """Take this node's place, where what node 0 posts fits what this node asked for."""
        nodes = len(joined.sizes)
        # how many are needed is node 0's to say
        is_complete = (
            nodes == len(joined.names) == len(joined.senders) <= self._settings.nodes and min(joined.sizes) > 0
        )
        if not (is_complete and 0 < joined.node_rank < nodes and joined.sizes[joined.node_rank] == self.local.size):
            return False
        self._take_place(joined)
        return True


def join_nodes(config: RunConfig) -> tuple[RunConfig, Placement, LaunchedNodes]:
    """Wait until all nodes have come; gives the configuration with what is node 0's to say, and the placement of all ranks; raises `LaunchError`."""
    settings, local = RendezvousSettings.of(config.launching), local_placement(config, probe())
    local = replace(local, why=f"{local.why}; {_ALL_IN_ONE_PANEL}")
    check_name(settings)
    listener = listen(settings) if hosts(settings) else None
    nodes: LaunchedNodes
    if listener is None:
        nodes = MemberNodes.joining(local, settings)
    else:
        nodes = host = HostNodes(listener, local, settings, config)
        host.meet()
    joined = nodes.joined
    placement = replace(local, size=sum(joined.sizes))
    try:
        check_training(config, placement)
    except BaseException as error:
        nodes.leave(str(error))
        raise
    launching = replace(
        config.launching,
        max_restarts=joined.max_restarts,
        restart_delay=joined.restart_delay,
        timeout=joined.timeout,
    )
    return replace(config, launching=launching), placement, nodes


def node_name(number: int, host: str) -> str:
    """The name of a node for people."""
    return f"node {number} on {host}"
