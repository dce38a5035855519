"""Nodes that are not there: real agents, in few processes of this machine, whose workers are threads that write and send as workers do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from accelerate_nb.events.event_codec import EventSender
from accelerate_nb.events.event_types import Progress, StateChange
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.launching.node_agent.agent_process import AgentServer
from accelerate_nb.launching.node_agent.node_network import NodeNetwork
from accelerate_nb.launching.nodes.node_pool import NodeEngine, PlacedAgent
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.outcome import write_result
from accelerate_nb.transport.worker_spec import LOOPBACK, LocalWorker

# How many times a second each rank writes a line, and for how long.
LINES_A_SECOND = 10
SECONDS_VARIABLE = "ACCELERATE_NB_BENCH_SECONDS"


@dataclass(frozen=True, eq=False)
class SimulatedNodes(NodeEngine):
    """Places agents in `count` processes, which take turns and serve many of them."""

    count: int = 8
    label = "this machine"
    inherits_environment = False
    _hosts: list[socket.socket] = field(default_factory=list)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> SimulatedNodes:
        for _ in range(self.count):
            near, far = socket.socketpair()
            with far:
                command = [sys.executable, "-m", "tests.bench.simulated_nodes", str(far.fileno())]
                self._processes.append(subprocess.Popen(command, pass_fds=[far.fileno()], start_new_session=True))
            self._hosts.append(near)
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.close()
        for process in self._processes:
            process.kill()
            process.wait()

    def place(self, node: str) -> PlacedAgent:
        near, far = socket.socketpair()
        with far, self._lock:
            socket.send_fds(self._hosts[0], [b"a"], [far.fileno()])
            self._hosts.append(self._hosts.pop(0))
        return PlacedAgent(Channel(near))

    def advice(self, node: str) -> str:
        return ""


class SimulatedWorkers:
    """Ranks that write a line ten times a second and move a bar, until their time is over."""

    def __init__(self, workers: Sequence[LocalWorker]) -> None:
        self._workers = workers
        self._codes: dict[int, int] = {}
        self._over = threading.Event()
        ends = {worker.rank: worker.descriptors for worker in workers}
        self._files = {rank: tuple(map(os.dup, (to.stdout, to.events, to.outcome))) for rank, to in ends.items()}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        seconds = float(self._workers[0].spec.process_environment.environ[SECONDS_VARIABLE])
        senders = {
            rank: EventSender(socket.socket(fileno=os.dup(events)), rank)
            for rank, (_, events, _) in self._files.items()
        }
        for rank, sender in senders.items():
            sender.send(StateChange(rank, "running", time.time(), str(os.getpid())))
        begin = time.monotonic()
        steps = int(seconds * LINES_A_SECOND)
        for step in range(steps):
            if self._over.wait(max(0.0, begin + step / LINES_A_SECOND - time.monotonic())):
                break
            for rank, (stdout, _, _) in self._files.items():
                os.write(stdout, b"step %d of %d: loss 0.%04d, 12.5 samples/s\n" % (step, steps, rank))
            if step % LINES_A_SECOND == 0:
                for rank, sender in senders.items():
                    sender.send(Progress(rank, "steps", step, steps, 10.0, time.time()))
        for rank, sender in senders.items():
            write_result(self._files[rank][2], RankResult(rank))
            sender.send(StateChange(rank, "finished", time.time()))
        self._codes.update(dict.fromkeys(self._files, 0))

    def exit_descriptors(self) -> Sequence[int]:
        """None: the agent looks for ends by itself."""
        return ()

    def news(self) -> None:
        pass

    def exit_codes(self) -> Mapping[int, int]:
        return self._codes

    def signal(self, number: int, ranks: Collection[int]) -> None:
        self._over.set()

    def kill(self) -> None:
        self._over.set()

    def lost(self) -> str | None:
        return None

    def close(self) -> None:
        self._thread.join()
        for files in self._files.values():
            for descriptor in files:
                os.close(descriptor)


def main() -> None:
    """Serve an agent for every descriptor that comes, until the other end has gone."""
    with ExitStack() as made, socket.socket(fileno=int(sys.argv[1])) as orders:
        while True:
            data, descriptors, _, _ = socket.recv_fds(orders, 1, 1)
            if not data:
                return
            sock = made.enter_context(socket.socket(fileno=descriptors[0]))
            server = AgentServer(Channel(sock), NodeNetwork(LOOPBACK), SimulatedWorkers)
            threading.Thread(target=server.serve, daemon=True).start()


if __name__ == "__main__":
    main()
