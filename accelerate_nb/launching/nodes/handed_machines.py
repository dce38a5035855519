"""Machines that have joined one process and are handed to another, the run host of a detached run, with their connections."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from accelerate_nb.launching.nodes.joined_machines import JoinedMachines, keep_machine
from accelerate_nb.launching.nodes.node_engine import NodeEngine
from accelerate_nb.launching.nodes.node_pool import lease
from accelerate_nb.transport.channel import Channel


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
