"""The connection of a node agent with one worker: two pipes, a socket for events, and files for its outcome and its stacks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.messages import StartWorkers
from accelerate_nb.transport.worker_spec import LocalWorker, WorkerDescriptors


@dataclass(frozen=True, slots=True)
class Connection:
    """The agent's ends; the worker's ends are in `far`, and closed here once the worker has them. `inbox` sends over `events`."""

    stdout: int
    stderr: int
    events: socket.socket
    inbox: Channel
    outcome: int
    stacks: int
    far: WorkerDescriptors

    @staticmethod
    def open() -> Connection:
        """Make all of them; nobody but this process and those it hands them to can open them."""
        opened: list[int] = []
        try:
            opened += os.pipe()
            opened += os.pipe()
            opened += (end.detach() for end in socket.socketpair())
            opened += map(memory_file, ("accelerate_nb_outcome", "accelerate_nb_stacks"))
            # one after the other, so that the first is closed where the second fails
            opened += (os.dup(file) for file in opened[-2:])
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        out_read, out_write, err_read, err_write, near, far, outcome, stacks, its_outcome, its_stacks = opened
        for descriptor in (out_read, err_read, near):
            os.set_blocking(descriptor, False)
        ends = WorkerDescriptors(stdout=out_write, stderr=err_write, events=far, outcome=its_outcome, stacks=its_stacks)
        events = socket.socket(fileno=near)
        return Connection(out_read, err_read, events, Channel(events), outcome, stacks, ends)

    def close(self) -> None:
        """Close the worker's ends here: its death must be seen as the end of the stream."""
        for descriptor in self.far.all():
            os.close(descriptor)

    def cut(self) -> None:
        """Close the agent's ends."""
        self.events.close()
        for descriptor in (self.stdout, self.stderr, self.outcome, self.stacks):
            os.close(descriptor)


def local_workers(
    request: StartWorkers, connections: Mapping[int, Connection], descriptors: Sequence[int]
) -> list[LocalWorker]:
    """
    The workers on this node: their specs with their ends of the connections, in the order of local ranks.

    `descriptors` are those of the request: the payload's, where it is not inherited, and the rendezvous's listening socket.
    """
    *payload, store = descriptors if request.has_store else (*descriptors, -1)
    file, more = (payload[0], tuple(payload[1:])) if payload else (-1, ())

    def ends(rank: int) -> WorkerDescriptors:
        return replace(connections[rank].far, payload=file, more=more, store=store if rank == 0 else -1)

    return [LocalWorker(spec, ends(spec.rank_info.rank)) for spec in request.specs]
