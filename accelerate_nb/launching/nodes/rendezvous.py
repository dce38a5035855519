"""The nodes of a run that is launched on each of them: they come to a rendezvous, and again before each further attempt."""

from __future__ import annotations

import errno
import os
import queue
import socket
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from msgspec import structs

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.devices.probe import AvailableDevices, probe
from accelerate_nb.errors import AccelerateNbError, ConfigurationError, LaunchError, NotYetError
from accelerate_nb.events.terminal_lines import plain_name
from accelerate_nb.launching.node_agent import node_network
from accelerate_nb.launching.nodes.launched_nodes import LaunchedNodes, NodeExchange
from accelerate_nb.launching.nodes.run_nodes import fixed_mesh, leave_out
from accelerate_nb.launching.planning.placement import Placement, check_training, choose_placement
from accelerate_nb.transport import messages
from accelerate_nb.transport.channel import Reply

# The port of Accelerate's and torchrun's launchers, and torchrun's time for nodes to come, in seconds.
DEFAULT_PORT = 29500
_JOIN_TIMEOUT = 600.0
# Its time for more nodes to come than are needed, in seconds.
_LAST_CALL = 30.0
# A name that nobody knows may be new: for how long, and how often, it is looked up, in seconds.
_NAME_TIMEOUT, _BETWEEN_LOOKUPS = 5.0, 0.25
# The entries of rdzv_conf that torchrun has for that time, and those that mean something here.
_TIMEOUTS = ("join_timeout", "timeout")
_KNOWN = {*_TIMEOUTS, "last_call_timeout", "is_host", "rank"}
# Between two tries to reach node 0, in seconds.
_PAUSE = 0.25
_CONNECT_TIMEOUT = 5.0
# Strangers may send any number of them.
_MOST_OBJECTIONS = 5


@dataclass(frozen=True, slots=True)
class RendezvousSettings:
    """The place and the terms of a rendezvous; `node_rank` is `None` where nodes get their ranks in the order in which they come."""

    host: str
    port: int
    nodes: int
    node_rank: int | None
    run_id: str
    timeout: float = _JOIN_TIMEOUT
    is_host: bool | None = None
    min_nodes: int | None = None
    last_call: float = _LAST_CALL

    @classmethod
    def of(cls, config: LaunchingConfig) -> RendezvousSettings:
        """The settings of a configuration; raises `ConfigurationError` where the endpoint or rdzv_conf can't be understood."""
        host, port = config.master_addr, ""
        if config.rdzv_endpoint.strip():
            host, port = node_network.split_endpoint(config.rdzv_endpoint)
        if port and not (port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigurationError(
                f"rdzv_endpoint={config.rdzv_endpoint.strip()!r} was given, and {port!r} is no port. Pass HOST:PORT."
            )
        conf = dict(config.rdzv_conf or {})
        if unknown := sorted(conf.keys() - _KNOWN):
            raise ConfigurationError(
                f"rdzv_conf has {', '.join(unknown)}, which mean nothing here. It takes {', '.join(sorted(_KNOWN))}; leave out the others."
            )
        timeout = next((conf[name] for name in _TIMEOUTS if name in conf), _JOIN_TIMEOUT)
        is_host = conf.get("is_host")
        try:
            return cls(
                host=host,
                port=int(port or config.use_port or DEFAULT_PORT),
                nodes=config.num_nodes,
                node_rank=int(conf.get("rank", config.node_rank)) if config.rdzv_backend == "static" else None,
                run_id=config.rdzv_id,
                timeout=float(timeout),
                is_host=None if is_host is None else str(is_host).lower() in {"1", "true", "yes", "t", "y"},
                min_nodes=config.min_nodes,
                last_call=float(conf.get("last_call_timeout", _LAST_CALL)),
            )
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"rdzv_conf={conf!r} was given, of which a value is no number. Pass seconds."
            ) from None

    @property
    def endpoint(self) -> str:
        """The endpoint as a person writes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def advice(self) -> str:
        """What to do about nodes that do not find each other."""
        if node_network.is_loopback(self.host):
            return (
                f"{self.host} is this machine alone: pass master_addr, the address of node 0 as the other nodes reach it, unless all nodes "
                "are launched here"
            )
        return (
            f"launch it on each of the {self.nodes} nodes with the same endpoint (master_addr and use_port, or rdzv_endpoint), and let a "
            f"firewall of node 0 pass port {self.port}"
        )


def local_placement(config: RunConfig, devices: AvailableDevices) -> Placement:
    """The placement of this node's ranks; pure. Raises `LaunchError` where they don't fit this machine."""
    settings = RendezvousSettings.of(config.launching)
    placement = choose_placement(config, devices, can_fork=hasattr(os, "fork"))
    if placement.kind == "xla":
        raise NotYetError(
            f"num_nodes={settings.nodes} was requested on XLA devices, which is not offered here yet. Launch it on one machine."
        )
    rank = "a node" if settings.node_rank is None else f"node {settings.node_rank}"
    return replace(
        placement, why=f"{placement.why}; {rank} of {settings.nodes}, by the rendezvous at {settings.endpoint}"
    )


def check_name(settings: RendezvousSettings) -> None:
    """Raise `LaunchError` where no host has the endpoint's name, and none gets it within some seconds: none will come by it."""
    deadline = time.monotonic() + min(_NAME_TIMEOUT, settings.timeout)
    while True:
        try:
            socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno != socket.EAI_NONAME:
                return
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"A run of {settings.nodes} nodes was requested at {settings.endpoint}, and there is no host of that name: "
                    f"{error.strerror}. Pass an address or a name that all nodes know as master_addr (or rdzv_endpoint)."
                ) from None
            time.sleep(_BETWEEN_LOOKUPS)
        else:
            return


def hosts(settings: RendezvousSettings) -> bool:
    """Whether this node is to host the rendezvous: node 0, or one that has the endpoint's address."""
    if settings.node_rank is not None:
        return settings.node_rank == 0
    if settings.is_host is not None:
        return settings.is_host
    return bool(_local_addresses(settings))


def _local_addresses(settings: RendezvousSettings) -> list[str]:
    """The addresses of the endpoint's host that this machine has, which has all of 127.0.0.0/8."""
    here = {"127.0.1.1"}.union(*node_network.interface_addresses().values())
    return [address for address in node_network.resolved_host(settings.host) if address in here]


def listen(settings: RendezvousSettings) -> socket.socket | None:
    """A socket that listens at the endpoint; `None` where another node of this machine has it, and any may host; raises `LaunchError`."""
    # on the interface that has its address, or on all where none has: behind a translation of addresses
    # names of a machine itself are often one of its loopback addresses, which no other machine reaches
    takes_loopback, is_loopback = node_network.is_loopback(settings.host), node_network.is_loopback
    address = next((item for item in _local_addresses(settings) if takes_loopback or not is_loopback(item)), "")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, settings.port), family=family, backlog=4096)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and settings.node_rank is None:
            return None
        raise LaunchError(
            f"A run of {settings.nodes} nodes was requested, which meet at {settings.endpoint}, and this node can't listen there: "
            f"{error.strerror}. Pass another use_port (or rdzv_endpoint) on all nodes, or end what has that port."
        ) from None


class _JoinedNode:
    """A node that has come, or node 0 itself, and carries out a request; what it replies comes into a queue."""

    def __init__(
        self, name: str, number: int, exchange: NodeExchange, replies: queue.SimpleQueue[messages.Message]
    ) -> None:
        self.name, self._number, self._exchange, self._replies = name, number, exchange, replies

    def request(self, message: messages.Message, reply_class: type[Reply], timeout: float) -> Reply:
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
        self._settings = settings
        super().__init__(NodeExchange(listener, address=address), local)

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

    def _on_message(self, entry: messages.NodeMessage, message: messages.Message) -> None:
        number = entry.sender
        match message:
            case messages.JoinRun() as request:
                if reason := self._objection(request):
                    self._refuse(number, reason)
                    return
                self._waiting[number] = request
                if self.roster.names:
                    self._put_off(number)
            case messages.NodeReady(attempt):
                self._ready[number] = attempt
        super()._on_message(entry, message)

    def _lose(self, number: int, reason: str) -> None:
        self._waiting.pop(number, None)
        if not self.roster.names:
            self._members.pop(number, None)
        super()._lose(number, reason)

    def _refuse(self, number: int, reason: str) -> None:
        """Have a node, and who waits here, know why it can't be one of this run."""
        objection = plain_name(reason.replace("this node", "that node"))
        if objection not in self._objections and len(self._objections) < _MOST_OBJECTIONS:
            self._objections.append(objection)
            node_network.print_notice(f"a node came, and was refused: {objection}")
        self._exchange.post(messages.RunRefused(reason), number)

    @property
    def _may_grow(self) -> bool:
        return self._settings.min_nodes is not None and not self._mesh

    def _put_off(self, number: int) -> None:
        """Have a node know for what it waits."""
        late = "in which this node takes part when it starts again"
        why = late if self._may_grow else "of which all nodes have come already"
        self._exchange.post(messages.ShowText(f"a run is under way there, {why}"), number)

    def _admit(self) -> None:
        """Have those that wait take part, as far as there is a place."""
        for number, request in list(self._waiting.items()):
            taken = {rank: other for other, (rank, _) in self._members.items()}
            rank = request.node_rank if request.node_rank is not None else next(iter(self._free), None)
            if rank is None:
                self._put_off(number)
                continue
            del self._waiting[number]
            if rank in taken:
                name = self._name(taken[rank])
                reason = f"node_rank={rank} was given, and {name} has joined as that already. Pass another on each node"
                self._refuse(number, reason)
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

    def _begin(self, attempt: int, text: str) -> None:
        """Give each node its place, in the order of their ranks."""
        if self._store is not None:
            self._store.close()
        self._store = socket.create_server((self._bound, 0), family=self._family, backlog=4096)
        # one that goes now has its place, and was lost
        members = dict(self._members)
        order = sorted(members, key=lambda number: members[number][0])
        if not self.roster.names:
            # where fewer came than could, one that went may have left a gap
            members = {number: (rank, members[number][1]) for rank, number in enumerate(order, 1)}
            self._members = dict(members)
        joined = messages.RunJoined(
            run=self.run or uuid.uuid4().hex,
            attempt=attempt,
            node_rank=0,
            senders=(0, *order),
            names=(
                node_name(0, self._facts.host),
                *(node_name(rank, item.facts.host) for rank, item in map(members.__getitem__, order)),
            ),
            sizes=(self.local.size, *(members[number][1].processes for number in order)),
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

    def __init__(self, exchange: NodeExchange, local: Placement, settings: RendezvousSettings) -> None:
        self._settings = settings
        super().__init__(exchange, local)

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
                        f"A run of {settings.nodes} nodes was requested, and node 0 at {settings.endpoint} refuses this one: {reason.rstrip('.')}."
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
    # each node shows its own part
    local = replace(
        local,
        why=f"{local.why}; each node shows its own ranks; hosts=, engine='slurm', 'ray' or 'join' show those of all in one panel",
    )
    check_name(settings)
    nodes: LaunchedNodes
    if hosts(settings) and (listener := listen(settings)) is not None:
        nodes = host = HostNodes(listener, local, settings, config)
        host.meet()
    else:
        nodes = MemberNodes.joining(local, settings)
    joined = nodes.joined
    placement = replace(local, size=sum(joined.sizes))
    try:
        check_training(config, placement)
    except BaseException as error:
        nodes.leave(str(error))
        raise
    launching = replace(
        config.launching, max_restarts=joined.max_restarts, restart_delay=joined.restart_delay, timeout=joined.timeout
    )
    return replace(config, launching=launching), placement, nodes


def node_name(number: int, host: str) -> str:
    """The name of a node for people."""
    return f"node {number} on {host}"
