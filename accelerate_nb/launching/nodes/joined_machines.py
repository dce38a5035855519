"""Agents on machines that joined this process by a line pasted into their terminal: they stay for its next launches, or go over to a run host."""

from __future__ import annotations

import atexit
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.launching.joining.join_ticket import JoinTicket, new_token
from accelerate_nb.launching.joining.machine_listener import JoiningMachine, MachineListener
from accelerate_nb.launching.nodes.node_checks import print_notice
from accelerate_nb.launching.nodes.node_engine import NodeEngine, PlacedAgent
from accelerate_nb.launching.nodes.node_placement import Host
from accelerate_nb.launching.nodes.node_pool import idle_nodes, lease
from accelerate_nb.launching.nodes.rendezvous_settings import is_loopback, resolved_host
from accelerate_nb.transport.channel import (
    Channel,
    is_readable,
)
from accelerate_nb.transport.messages import MembershipGranted

# What is waited for is looked at so often, in seconds.
_ROUND = 1.0


@dataclass(frozen=True, slots=True)
class JoinedMachines:
    """Places an agent by taking that of a machine that has joined at `address`, under that name."""

    address: str

    label = "accelerate-nb join"
    inherits_environment = True

    def place(self, node: str) -> PlacedAgent:
        """The agent of a machine; raises `LaunchError` where it has gone, or another run has it."""
        channel = _members.get().take(self.address, node)
        if channel is None:
            raise LaunchError(
                f"Workers on {node} were requested, which had joined; its agent has ended, or another run uses it, and no run takes a "
                "machine back. Launch again: where machines are missing, the line to join is shown."
            )
        return PlacedAgent(channel)

    def replacement(self, _: str) -> None:
        """None: machines come by themselves."""

    def advice(self, node: str) -> str:
        """Its own terminal shows what became of it."""
        return (
            f"Look at the terminal of {node}, and launch again: where machines are missing, the line to join is shown"
        )


@dataclass
class _Members:
    """The machines that have joined this process, by the address at which they did, and the ticket of each address."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    tickets: dict[str, JoinTicket] = field(default_factory=dict)
    # the file of each ticket
    ticket_files: dict[str, str] = field(default_factory=dict)
    channels: dict[tuple[str, str], Channel] = field(default_factory=dict)
    # those whose agent no launch has taken yet, in their order
    waiting: list[tuple[str, str]] = field(default_factory=list)

    def take(self, address: str, name: str) -> Channel | None:
        """The channel to an agent that no launch has taken yet."""
        with self.lock:
            if (address, name) not in self.waiting:
                return None
            self.waiting.remove((address, name))
            return self.channels[address, name]

    def admit(self, address: str, machine: JoiningMachine) -> str:
        """Keep a machine under its name, or the next one that is free; returns it, "" where the machine has gone."""
        with self.lock:
            name, number = machine.name, 1
            while (known := self.channels.get((address, name))) is not None and not known.is_closed:
                number += 1
                name = f"{machine.name}-{number}"
            if not machine.channel.try_send(MembershipGranted(name)):
                machine.channel.close()
                return ""
            self._add(address, name, machine.channel)
            return name

    def keep(self, address: str, name: str, channel: Channel) -> None:
        """Keep a machine that has this name already."""
        with self.lock:
            self._add(address, name, channel)

    def _add(self, address: str, name: str, channel: Channel) -> None:
        self.channels[address, name] = channel
        self.waiting.append((address, name))

    def drop_gone(self, address: str) -> list[str]:
        """Drop those that have gone before a launch took them; returns their names. An agent that is there says nothing by itself."""
        with self.lock:
            gone = [key for key in self.waiting if key[0] == address and is_readable(self.channels[key].fileno(), 0)]
            for key in gone:
                self.waiting.remove(key)
                self.channels.pop(key).close()
            return [name for _, name in gone]

    def waiting_at(self, address: str) -> dict[str, Channel]:
        """Those that no launch has taken yet."""
        with self.lock:
            return {name: self.channels[key] for key in self.waiting if key[0] == address for name in key[1:]}


_members: ContextVar[_Members] = ContextVar("accelerate_nb_members", default=_Members())  # noqa: B039 - one for all threads


def keep_machine(address: str, name: str, channel: Channel) -> None:
    """Have launches find a machine that joined another process at this address, and was given this name there."""
    _members.get().keep(address, name, channel)


def wait_for_machines(config: LaunchingConfig) -> tuple[JoinedMachines, tuple[Host, ...]]:
    """
    The machines of a launch: those that have joined this process before and are free, and those that are waited for.

    While it waits, it listens at `join_address`, and shows the line to join on standard error. Raises `LaunchError` where too few
    have come within `join_timeout` seconds, or it can't listen; those that came stay for the next launch.
    """
    host, port = _address_and_port(config.join_address)
    engine = JoinedMachines(host)
    names = _free(engine)
    if len(names) < config.num_nodes:
        names = _wait(engine, port, config.num_nodes, config.join_timeout)
    return engine, tuple(Host(name) for name in names[: config.num_nodes])


def _free(engine: JoinedMachines) -> list[str]:
    _ = _members.get().drop_gone(engine.address)
    return [*idle_nodes(engine), *_members.get().waiting_at(engine.address)]


def _wait(engine: JoinedMachines, port: int, count: int, timeout: float) -> list[str]:
    """The free machines, as soon as there are so many."""
    members, deadline = _members.get(), time.monotonic() + timeout
    idle = idle_nodes(engine)

    def names() -> list[str]:
        return [*idle, *members.waiting_at(engine.address)]

    with _listener(engine.address, port) as listener:
        _show_line(listener.ticket, count, names(), timeout)
        while len(names()) < count:
            if (left := deadline - time.monotonic()) <= 0:
                raise LaunchError(_missing_text(listener, count, names(), timeout))
            try:
                machines = listener.wait(min(_ROUND, left), list(members.waiting_at(engine.address).values()))
            except LaunchError:
                # the next line has another token
                members.tickets.pop(engine.address, None)
                raise
            for name in members.drop_gone(engine.address):
                print_notice(f"{name} has left: {len(names())} of {count} machines are there")
            for machine in machines:
                if name := members.admit(engine.address, machine):
                    print_notice(f"{name} has joined: {len(names())} of {count} machines are there")
    return names()


def _listener(address: str, port: int) -> MachineListener:
    """A listener with the ticket of before, so that its line serves again, where its port is still free."""
    members = _members.get()
    before = members.tickets.get(address)
    token = new_token() if before is None else before.token
    listener = None
    if before is not None and not port:
        # another program may have taken a port that nobody named
        with suppress(LaunchError):
            listener = MachineListener(before)
    if listener is None:
        listener = MachineListener(JoinTicket(token, address, port))
    members.tickets[address] = listener.ticket
    return listener


def _show_line(ticket: JoinTicket, count: int, there: Sequence[str], timeout: float) -> None:
    so_far = f" ({', '.join(there)})" if there else ""
    alone = "; 127.0.0.1 is this machine alone, so pass join_address for others" if is_loopback(ticket.host) else ""
    print_notice(
        f"accelerate-nb join {ticket}\n"
        f"Run this line in a terminal of each machine{alone}. It is also in {_ticket_file(ticket)}, which only you can read.\n"
        f"{len(there)} of {count} machines are there{so_far}; waiting for the others up to {timeout:g} s"
    )


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


def _missing_text(listener: MachineListener, count: int, names: Sequence[str], timeout: float) -> str:
    came = f"{len(names)} had joined ({', '.join(names)})" if names else "none had joined"
    refused = f", and {listener.refused} other connections were refused" if listener.refused else ""
    ticket = listener.ticket
    way = (
        f"{ticket.host} is this machine alone: pass join_address, the address of this machine as the others reach it"
        if is_loopback(ticket.host)
        else f"a firewall of this machine has to let port {ticket.port} pass"
    )
    return (
        f"num_nodes={count} was requested of machines that join at {ticket.endpoint}, and after {timeout:g} s {came}{refused}. To go on, launch "
        f"again and run its line on the others ({way}); those that have joined stay, and the line remains valid."
    )


def _address_and_port(text: str) -> tuple[str, int]:
    """The one address to listen at, and the port, or 0 for any free one; raises `LaunchError` or `ConfigurationError`."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        host, port = text.strip(), "0"
    if not (port.isdecimal() and int(port) < 65536):
        raise ConfigurationError(
            f"join_address={text!r} was given, and {port!r} is no port. Pass ADDRESS or ADDRESS:PORT."
        )
    host = host.strip("[]")
    found = resolved_host(host) if host else []
    if not found or set(found) & {"0.0.0.0", "::"}:
        raise LaunchError(
            f"join_address={text!r} was requested, which names no one address of this machine ({socket.gethostname()}). Pass the address at "
            "which the other machines reach it, such as 10.0.0.1."
        )
    # names of a machine itself are often one of its loopback addresses, which no other machine reaches
    return next((item for item in found if is_loopback(host) or not is_loopback(item)), found[0]), int(port)


@dataclass(frozen=True, slots=True)
class HandedMachine:
    """A machine on its way to another process: its name, the address at which it joined, and the descriptor of its socket."""

    name: str
    address: str
    descriptor: int


@contextmanager
def handed_machines(engine: NodeEngine | None, names: Sequence[str]) -> Iterator[tuple[HandedMachine, ...]]:
    """
    The nodes of a run for another process, which inherits their descriptors within the block; none where they did not join.

    Afterwards they are that one's alone; after an error they have left. Raises `LaunchError` where one has left before.
    """
    if not isinstance(engine, JoinedMachines):
        yield ()
        return
    # their agents have replied and have no workers: nothing is on its way from them
    connections = lease(engine, names)
    try:
        yield tuple(
            HandedMachine(connection.name, engine.address, connection.channel.fileno()) for connection in connections
        )
    except BaseException:
        # nobody knows what the other process has sent to them
        for connection in connections:
            connection.close(0.0)
        raise
    for connection in connections:
        # this descriptor alone: the connection goes on
        connection.channel.close()


def take_over(machines: Sequence[HandedMachine]) -> None:
    """Have this process's launches find machines that another process has handed to it."""
    for machine in machines:
        keep_machine(machine.address, machine.name, Channel(socket.socket(fileno=machine.descriptor)))
