"""Agents that no run uses stay through an interrupt, and are ended together."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import NoReturn

import pytest

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.node_agent.agent_process import AgentServer
from accelerate_nb.launching.nodes import node_pool
from accelerate_nb.launching.nodes.node_pool import NodeConnection, PlacedAgent
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import VERSION

# Ends once the connections of all agents have ended.
_AGENT = "import os, sys; print(flush=True); [os.read(int(number), 1) for number in sys.argv[1:]]"


@dataclass(frozen=True)
class Placed:
    """Agents that were placed before."""

    label = "tests"
    inherits_environment = False
    agents: tuple[tuple[str, PlacedAgent], ...]

    def place(self, node: str) -> PlacedAgent:
        return dict(self.agents)[node]

    def advice(self, node: str) -> str:
        return ""


@pytest.mark.timeout(40)
def test_no_agent_waits_for_the_end_of_another_one() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    numbers = [far.fileno() for _, far in pairs]
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", _AGENT, *map(str, numbers)], pass_fds=numbers, stdout=subprocess.PIPE
        )
        for _ in pairs
    ]
    agents = (PlacedAgent(Channel(near), process) for (near, _), process in zip(pairs, processes, strict=True))
    engine = Placed(tuple(zip("abc", agents, strict=True)))
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        process.stdout.close()
    for name in "abc":
        node_pool.release(NodeConnection(engine, name), is_usable=True)
    for _, far in pairs:
        far.close()
    node_pool.close_nodes()
    # one that had to wait for the end of another was killed
    assert [process.returncode for process in processes] == [0, 0, 0]


def test_an_agent_of_another_version_is_refused_with_both_versions() -> None:
    near, far = socket.socketpair()
    with far:
        # a stand-in: there is no other version of this package to install here
        far.sendall(struct.pack("<4sHHI", b"\x93ANB", VERSION + 1, 0, 2) + b"{}")
        connection = NodeConnection(Placed((("a", PlacedAgent(Channel(near))),)), "a")
        with pytest.raises(
            LaunchError, match=rf"version {VERSION + 1}.*{VERSION} .*: another release of accelerate_nb"
        ):
            connection.open()
        connection.close()


@pytest.mark.timeout(40)
def test_an_interrupt_while_agents_are_looked_for_ends_those_alone_whose_reply_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    for _, far in pairs:
        threading.Thread(target=AgentServer(Channel(far)).serve, daemon=True).start()
    agents = (PlacedAgent(Channel(near)) for near, _ in pairs)
    engine = Placed(tuple(zip("ab", agents, strict=True)))
    connections = [NodeConnection(engine, name) for name in "ab"]
    for connection in connections:
        connection.open()
        node_pool.release(connection, is_usable=True)

    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(node_pool, "_FRESH", 0.0)
        patched.setattr(connections[1].channel, "request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            node_pool.idle_nodes(engine)
    assert node_pool.idle_nodes(engine) == ["a"]
    assert connections[1].channel.is_closed
    node_pool.close_nodes()


@pytest.mark.timeout(40)
def test_an_interrupt_while_hosts_do_not_reply_ends_the_wait_for_them() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    engine = Placed(tuple((name, PlacedAgent(Channel(near))) for name, (near, _) in zip("ab", pairs, strict=True)))

    def interrupt() -> None:
        for _, far in pairs:
            assert far.recv(1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    # a minute goes by without a reply else
    with pytest.raises(KeyboardInterrupt):
        node_pool.lease(engine, ["a", "b"])
    thread.join()
    for _, far in pairs:
        far.close()
