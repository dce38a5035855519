"""Machines that join this process by a line pasted into their terminal: who comes proves the token; they stay for its next launches, or go over to a run host."""

import atexit
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.errors import ConfigurationError, LaunchError, ProtocolError
from accelerate_nb.launching.node_agent import node_network
from accelerate_nb.launching.node_agent.agent_process import JoinTicket, new_token
from accelerate_nb.launching.nodes import node_pool
from accelerate_nb.launching.planning.placement import Host
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.handshake import ListenerHandshake
from accelerate_nb.transport.messages import MembershipGranted, RequestMembership

# What is waited for is looked at so often, in seconds.
_ROUND = 1.0
# So many connections with another token, and the listener closes: somebody guesses, or the line was copied wrong.
MOST_WRONG_TOKENS = 5
_LONGEST_NAME = 64
# Connections that have sent nothing yet: so many may wait, each for so many seconds. A port that others reach meets strangers.
_MOST_PENDING = 128
_PENDING_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class JoiningMachine:
    """A machine that has proved the token: the name that it wants, and the channel to its agent."""

    name: str
    channel: Channel


@dataclass(slots=True)
class _Newcomer:
    """A connection on its way to a `JoiningMachine`."""

    sock: socket.socket
    handshake: ListenerHandshake
    since: float
    channel: Channel | None = None

    def read(self) -> JoiningMachine | None:
        """Take what has come, without waiting; raises `ProtocolError` or `OSError` where it will be no machine."""
        if self.channel is None:
            data = self.sock.recv(self.handshake.missing, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionError("it has closed its connection")
            # some bytes, which the system takes on a connection that has sent nothing else
            self.sock.send(self.handshake.feed(data))
            if not self.handshake.missing:
                self.channel = Channel(self.sock)
            return None
        received = next(self.channel.receive_ready(), None)
        match received and received.message:
            case None if not self.channel.is_ended:
                return None
            case RequestMembership(name) if name and name.isprintable() and len(name) <= _LONGEST_NAME:
                return JoiningMachine(name, self.channel)
        raise ProtocolError("unexpected", "a connection that has the token is no machine that joins")


class MachineListener:
    """Listens at one address and port for machines that prove a ticket's token, until it is closed."""

    def __init__(self, ticket: JoinTicket, timeout: float = _PENDING_TIMEOUT) -> None:
        family = socket.AF_INET6 if ":" in ticket.host else socket.AF_INET
        try:
            self._socket = socket.create_server((ticket.host, ticket.port), family=family, backlog=128)
        except OSError as error:
            raise LaunchError(
                f"join_address={ticket.endpoint!r} was requested, and this process can't listen there: {error.strerror or error}. Pass one "
                "address of this machine, as the other machines reach it, and a port that is free, or none."
            ) from error
        # one that has gone before it was accepted
        self._socket.setblocking(False)
        self.ticket = JoinTicket(ticket.token, ticket.host, int(self._socket.getsockname()[1]))
        self._timeout = timeout
        self._newcomers: dict[socket.socket, _Newcomer] = {}
        # the number of connections that were refused, and of those among them that had another token
        self.refused = self._wrong_tokens = 0

    def close(self) -> None:
        """Listen no more, and close the connections of those that have not joined yet."""
        self._socket.close()
        while self._newcomers:
            self._newcomers.popitem()[0].close()

    def wait(self, timeout: float) -> list[JoiningMachine]:
        """The machines that have joined, once something has come; closes and raises `LaunchError` after too many wrong tokens."""
        with selectors.DefaultSelector() as selector:
            for sock in (self._socket, *self._newcomers):
                selector.register(sock, selectors.EVENT_READ)
            readable = {key.fileobj for key, _ in selector.select(timeout)}
        if self._socket in readable:
            with suppress(BlockingIOError, ConnectionError):
                sock = self._socket.accept()[0]
                if len(self._newcomers) < _MOST_PENDING:
                    node_network.probe_connection(sock)
                    self._newcomers[sock] = _Newcomer(sock, ListenerHandshake(self.ticket.key), time.monotonic())
                else:
                    sock.close()
        ready = [sock for sock in self._newcomers if sock in readable]
        found = [machine for sock in ready if (machine := self._read(sock)) is not None]
        now = time.monotonic()
        for sock in [sock for sock, newcomer in self._newcomers.items() if now - newcomer.since > self._timeout]:
            self._refuse(sock)
        return found

    def _read(self, sock: socket.socket) -> JoiningMachine | None:
        try:
            machine = self._newcomers[sock].read()
        except BlockingIOError:
            return None
        except ProtocolError as error:
            self._refuse(sock)
            self._wrong_tokens += error.refusal == "token"
            if self._wrong_tokens >= MOST_WRONG_TOKENS:
                self.close()
                raise LaunchError(
                    f"Machines were waited for at {self.ticket.endpoint}, and {self._wrong_tokens} connections had another token: the line was "
                    "copied wrong, or somebody guesses. The port was closed; launch again for a line with a new token."
                ) from None
            return None
        except OSError:
            self._refuse(sock)
            return None
        if machine is not None:
            del self._newcomers[sock]
        return machine

    def _refuse(self, sock: socket.socket) -> None:
        """Count a connection that is none of those that are waited for, and close it."""
        self.refused += 1
        del self._newcomers[sock]
        sock.close()


@dataclass(frozen=True, slots=True)
class JoinedMachines(node_pool.NodeEngine):
    """The agents of machines that have joined at `address`, each under its name."""

    address: str

    label = "accelerate-nb join"

    def place(self, node: str) -> node_pool.PlacedAgent:
        """Raises `LaunchError`: who has joined is in the pool, unless it has gone, or another run has it."""
        raise LaunchError(
            f"Workers on {node} were requested, which had joined; its agent has ended, or another run uses it, and no run takes a "
            "machine back. Launch again: where machines are missing, the line to join is shown."
        )

    def advice(self, node: str) -> str:
        return (
            f"Look at the terminal of {node}, and launch again: where machines are missing, the line to join is shown"
        )

    @contextmanager
    def handed_over(self, names: Sequence[str]) -> Iterator[tuple[node_pool.HandedMachine, ...]]:
        """These machines for another process, which inherits their descriptors within the block; raises `LaunchError` where one has left."""
        # their agents have replied and have no workers: nothing is on its way from them
        connections = node_pool.lease(self, names)
        try:
            yield tuple(node_pool.HandedMachine(item.name, self.address, item.channel.fileno()) for item in connections)
        except BaseException:
            # nobody knows what the other process has sent to them
            for connection in connections:
                connection.close(0.0)
            raise
        for connection in connections:
            # this descriptor alone: the connection goes on
            connection.channel.close()


@dataclass
class _Members:
    """The tickets of this process, by their addresses, with the file of each, and the channels to machines that have joined."""

    tickets: dict[str, JoinTicket] = field(default_factory=dict)
    ticket_files: dict[str, str] = field(default_factory=dict)
    channels: dict[tuple[str, str], Channel] = field(default_factory=dict)


_members: ContextVar[_Members] = ContextVar("accelerate_nb_members", default=_Members())  # noqa: B039 - one for all threads


def wait_for_machines(config: LaunchingConfig) -> tuple[JoinedMachines, tuple[Host, ...]]:
    """The machines of a launch: those that have joined before and are free, and those that join while it waits; raises `LaunchError`."""
    host, port = _address_and_port(config.join_address)
    engine = JoinedMachines(host)
    names = node_pool.idle_nodes(engine)
    if len(names) < config.num_nodes:
        names = _wait(engine, port, config.num_nodes, config.join_timeout)
    return engine, tuple(Host(name) for name in names[: config.num_nodes])


def _wait(engine: JoinedMachines, port: int, count: int, timeout: float) -> list[str]:
    """The free machines, as soon as there are so many."""
    deadline, names = time.monotonic() + timeout, node_pool.idle_nodes(engine)
    with closing(_listener(engine.address, port)) as listener:
        ticket, is_alone = listener.ticket, node_network.is_loopback(listener.ticket.host)
        alone = "; 127.0.0.1 is this machine alone, so pass join_address for others" if is_alone else ""
        so_far = f" ({', '.join(names)})" if names else ""
        node_network.print_notice(
            f"accelerate-nb join {ticket}\n"
            f"Run this line in a terminal of each machine{alone}. It is also in {_ticket_file(ticket)}, which only you can read.\n"
            f"{len(names)} of {count} machines are there{so_far}; waiting for the others up to {timeout:g} s"
        )
        while len(names) < count:
            if (left := deadline - time.monotonic()) <= 0:
                came = f"{len(names)} had joined ({', '.join(names)})" if names else "none had joined"
                refused = f", and {listener.refused} other connections were refused" if listener.refused else ""
                way = f"a firewall of this machine has to let port {ticket.port} pass"
                if is_alone:
                    way = f"{ticket.host} is this machine alone: pass join_address, the address of this machine as the others reach it"
                raise LaunchError(
                    f"num_nodes={count} was requested of machines that join at {ticket.endpoint}, and after {timeout:g} s {came}{refused}. "
                    f"To go on, launch again and run its line on the others ({way}); those that have joined stay, and the line remains valid."
                )
            try:
                machines = listener.wait(min(_ROUND, left))
            except LaunchError:
                # the next line has another token
                _members.get().tickets.pop(engine.address, None)
                raise
            before, names = names, node_pool.idle_nodes(engine)
            for name in before:
                if name not in names:
                    node_network.print_notice(f"{name} has left: {len(names)} of {count} machines are there")
            for machine in machines:
                if name := _admit(engine, machine):
                    names.append(name)
                    node_network.print_notice(f"{name} has joined: {len(names)} of {count} machines are there")
    return names


def _admit(engine: JoinedMachines, machine: JoiningMachine) -> str:
    """Keep a machine under its name, or the next one that is free; returns it, "" where the machine has gone."""
    channels, name, number = _members.get().channels, machine.name, 1
    while (known := channels.get((engine.address, name))) is not None and not known.is_closed:
        number += 1
        name = f"{machine.name}-{number}"
    if not machine.channel.try_send(MembershipGranted(name)):
        machine.channel.close()
        return ""
    channels[engine.address, name] = machine.channel
    node_pool.release(node_pool.NodeConnection(engine, name, node_pool.PlacedAgent(machine.channel)), is_usable=True)
    return name


def _listener(address: str, port: int) -> MachineListener:
    """A listener with the ticket of before, so that its line serves again, where its port is still free."""
    members = _members.get()
    before = members.tickets.get(address) or JoinTicket(new_token(), address, 0)
    try:
        listener = MachineListener(before if not port else replace(before, port=port))
    except LaunchError:
        if port or not before.port:
            raise
        # another program has taken a port that nobody named
        listener = MachineListener(replace(before, port=0))
    members.tickets[address] = listener.ticket
    return listener


def _ticket_file(ticket: JoinTicket) -> str:
    """A file that only this user can read, with the ticket, the same for each wait; it is removed when this process ends."""
    files = _members.get().ticket_files
    if os.path.exists(files.get(str(ticket), "")):
        return files[str(ticket)]
    descriptor, path = tempfile.mkstemp(prefix="accelerate_nb_join_")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{ticket}\n")
    atexit.register(Path(path).unlink, missing_ok=True)
    files[str(ticket)] = path
    return path


def _address_and_port(text: str) -> tuple[str, int]:
    """The one address to listen at, and the port, or 0 for any free one; raises `LaunchError` or `ConfigurationError`."""
    host, port = node_network.split_endpoint(text)
    if port and not (port.isdecimal() and int(port) < 65536):
        raise ConfigurationError(
            f"join_address={text!r} was given, and {port!r} is no port. Pass ADDRESS or ADDRESS:PORT."
        )
    found = node_network.resolved_host(host) if host else []
    if not found or set(found) & {"0.0.0.0", "::"}:
        raise LaunchError(
            f"join_address={text!r} was requested, which names no one address of this machine ({socket.gethostname()}). Pass the address at "
            "which the other machines reach it, such as 10.0.0.1."
        )
    # names of a machine itself are often one of its loopback addresses, which no other machine reaches
    far = [item for item in found if node_network.is_loopback(host) or not node_network.is_loopback(item)]
    return (far or found)[0], int(port or 0)


def take_over(machines: Sequence[node_pool.HandedMachine]) -> None:
    """Have this process's launches find machines that another process has handed to it."""
    for machine in machines:
        placed = node_pool.PlacedAgent(Channel(socket.socket(fileno=machine.descriptor)))
        connection = node_pool.NodeConnection(JoinedMachines(machine.address), machine.name, placed)
        node_pool.release(connection, is_usable=True)
