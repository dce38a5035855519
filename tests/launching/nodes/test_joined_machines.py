"""Machines that join by a line in their terminal run launches like any nodes, stay for the next one, and are named when they go."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from accelerate_nb import Accelerator, StoppedError, attach, launch
from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import ConfigurationError, LaunchError, ProtocolError
from accelerate_nb.launching.node_agent.agent_process import AgentServer, JoinTicket
from accelerate_nb.launching.nodes import joined_machines, node_pool
from accelerate_nb.launching.nodes.joined_machines import wait_for_machines
from accelerate_nb.transport.channel import Channel, ReceivedMessage
from accelerate_nb.transport.handshake import prove_token
from accelerate_nb.transport.messages import MembershipGranted, RequestMembership
from tests.nodes.trainings import LAUNCHES_DETACHED, TWO_NODES, waits
from tests.waiting import until, until_lines

pytestmark = pytest.mark.timeout(120)


def adds_up() -> tuple[int, str]:
    """The sum over all ranks of their numbers from one, and the number of this one's node."""
    import torch

    accelerator = Accelerator()
    total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0))
    return int(total), os.environ["GROUP_RANK"]


class Terminal(io.StringIO):
    """Standard error, beside which people on other machines paste the line that it shows."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = list(names)
        self.machines: dict[str, subprocess.Popen[bytes]] = {}

    def write(self, text: str) -> int:
        if found := re.search(r"^accelerate-nb join (\S+)$", text, flags=re.MULTILINE):
            for name in self.names:
                self.machines[name] = subprocess.Popen(
                    [sys.executable, "-m", "accelerate_nb", "join", "--name", name],
                    env={**os.environ, "ACCELERATE_NB_JOIN": found[1], "PYTHONPATH": os.pathsep.join(sys.path)},
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            self.names.clear()
        return super().write(text)

    @property
    def tickets(self) -> list[str]:
        return re.findall(r"^accelerate-nb join (\S+)$", self.getvalue(), flags=re.MULTILINE)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal("box", "attic")
    yield terminal
    node_pool.close_nodes()
    for machine in terminal.machines.values():
        if machine.poll() is None:
            machine.terminate()
        machine.communicate(timeout=20)


@pytest.fixture
def screen(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """What this process shows, where nobody pastes anything."""
    monkeypatch.setattr(joined_machines.node_network, "print_notice", lambda text: terminal.write(f"{text}\n"))
    terminal.names.clear()
    return terminal


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {**TWO_NODES, "engine": "join", "join_timeout": 60.0, "folder": str(tmp_path)}


@pytest.mark.slow
def test_joined_machines_run_a_launch_stay_for_the_next_launch_and_are_named_when_they_are_lost(
    terminal: Terminal, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    assert launch(adds_up, **settings, results="all").wait() == [(3, "0"), (3, "1")]
    (ticket,) = terminal.tickets
    pids = {name: machine.pid for name, machine in terminal.machines.items()}

    run = launch(waits, **settings)
    until_lines(run, 2)
    # the second launch has shown no line, and the workers are those of the same agents
    assert terminal.tickets == [ticket]
    workers = [psutil.Process(int(run.view.rank(rank).detail)) for rank in range(2)]
    agents = [{parent.pid for parent in worker.parents()} & set(pids.values()) for worker in workers]
    assert agents[0] | agents[1] == set(pids.values())
    lost = next(name for name, pid in pids.items() if pid in agents[1])
    terminal.machines[lost].kill()
    with pytest.raises(LaunchError, match=rf"the agent of {lost} \(rank 1\) was lost: its connection has ended"):
        run.wait(60)
    assert not psutil.wait_procs(workers, timeout=20)[1]

    # who is left stays, and the same line serves again
    terminal.machines[lost].communicate()
    terminal.names.append(lost)
    assert launch(adds_up, **settings, results="all").wait() == [(3, "0"), (3, "1")]
    assert terminal.tickets == [ticket, ticket]
    assert "1 of 2 machines are there" in terminal.getvalue()

    # one leaves by Ctrl-C, the other when the notebook ends
    (left,) = set(pids) - {lost}
    terminal.machines[left].send_signal(signal.SIGINT)
    assert b"has left the notebook" in terminal.machines[left].communicate(timeout=20)[1]
    node_pool.close_nodes()
    text = terminal.machines[lost].communicate(timeout=20)[1]
    assert b"has ended, or closed this connection" in text
    assert {machine.returncode for machine in terminal.machines.values()} == {0}


@pytest.mark.slow
def test_machines_go_on_with_a_detached_run_when_its_kernel_was_killed_and_leave_with_it(
    terminal: Terminal, settings: dict[str, Any]
) -> None:
    kernel = subprocess.Popen(
        [sys.executable, "-c", LAUNCHES_DETACHED, json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert kernel.stderr is not None
    assert kernel.stdout is not None
    while not terminal.tickets:
        terminal.write(kernel.stderr.readline())
    run = attach(kernel.stdout.readline().strip(), panel=False)
    os.killpg(kernel.pid, signal.SIGKILL)
    kernel.communicate()
    until_lines(run, 2)
    assert (run.logs(0), run.logs(1)) == ("waits\n", "waits\n")
    assert "time.sleep(600)" in run.stacks()
    assert {machine.poll() for machine in terminal.machines.values()} == {None}
    run.request_stop("interrupt")
    with pytest.raises(StoppedError):
        run.wait(60)
    for machine in terminal.machines.values():
        assert b"has ended, or closed this connection" in machine.communicate(timeout=20)[1]
        assert machine.returncode == 0


@contextmanager
def wait_for_a_machine(terminal: Terminal, config: LaunchingConfig) -> Iterator[tuple[Future[Any], JoinTicket]]:
    """A launch that waits for machines in a thread, which the block waits for, and the ticket that it has printed."""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait_for_machines, config)
        until(lambda: terminal.tickets or waiting.done())
        assert terminal.tickets, waiting.result()
        yield waiting, JoinTicket.parse(terminal.tickets[0])


def admitted(ticket: JoinTicket, name: str) -> Channel:
    """The connection of a machine, which is given that name."""
    sock = socket.create_connection((ticket.host, ticket.port), 10)
    prove_token(sock, ticket.key, 10.0)
    channel = Channel(sock)
    channel.send(RequestMembership("twin"))
    assert channel.receive(10.0) == ReceivedMessage(MembershipGranted(name))
    return channel


def joined(ticket: JoinTicket, name: str) -> Channel:
    """The connection of a machine, which is given that name, and whose agent serves."""
    channel = admitted(ticket, name)
    threading.Thread(target=AgentServer(channel).serve, daemon=True).start()
    return channel


def test_a_machine_whose_agent_takes_long_to_reply_holds_up_no_other(screen: Terminal) -> None:
    config = resolve({"engine": "join", "num_nodes": 2, "join_timeout": 30.0}, {}).launching
    with wait_for_a_machine(screen, config) as (waiting, ticket):
        machines = [admitted(ticket, name) for name in ("twin", "twin-2")]
        assert [host.name for host in waiting.result()[1]] == ["twin", "twin-2"]
    for machine in machines:
        machine.shutdown()


def test_a_wait_that_is_over_reports_who_has_come_and_keeps_them(
    screen: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = resolve({"engine": "join", "num_nodes": 3, "join_address": address, "join_timeout": 30.0}, {}).launching
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(joined_machines, "time", clock)
    with wait_for_a_machine(screen, config) as (waiting, ticket):
        first, gone, second = joined(ticket, "twin"), joined(ticket, "twin-2"), None
        until(lambda: "twin-2 has joined" in screen.getvalue())
        gone.shutdown()
        until(lambda: "twin-2 has left" in screen.getvalue())
        second = joined(ticket, "twin-2")
        until(lambda: screen.getvalue().count("twin-2 has joined") == 2)
        clock.monotonic = lambda: 31.0
        with pytest.raises(LaunchError) as caught:
            waiting.result()
    assert re.search(r"after 30 s 2 had joined \(twin, twin-2\).*pass join_address", str(caught.value))
    assert ticket.token not in str(caught.value)
    # the same launch on as many machines as are there begins at once
    engine, hosts = wait_for_machines(resolve({"engine": "join", "num_nodes": 2}, {}).launching)
    assert [host.name for host in hosts] == ["twin", "twin-2"]
    assert len(screen.tickets) == 1
    # one that has gone since is an error in words
    first.shutdown()
    with pytest.raises(LaunchError, match="twin were requested, which had joined; its agent has ended"):
        node_pool.lease(engine, ["twin"])
    second.shutdown()


def test_after_wrong_tokens_the_launch_fails_and_the_next_line_has_another_token(screen: Terminal) -> None:
    config = resolve({"engine": "join", "join_timeout": 30.0}, {}).launching
    with wait_for_a_machine(screen, config) as (waiting, ticket):
        for _ in range(5):
            with (
                socket.create_connection((ticket.host, ticket.port), 10) as guess,
                pytest.raises(ProtocolError, match="another token"),
            ):
                prove_token(guess, bytes(16), 10.0)
        with pytest.raises(LaunchError, match=r"5 connections had another token.*The port was closed") as caught:
            waiting.result()
    assert ticket.token not in str(caught.value)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ticket.host, ticket.port), 5)
    with pytest.raises(LaunchError, match="none had joined"):
        wait_for_machines(replace(config, join_timeout=0.0))
    assert JoinTicket.parse(screen.tickets[1]).token != ticket.token


def test_the_file_of_the_ticket_is_for_its_user_alone(screen: Terminal) -> None:
    for _ in range(2):
        with pytest.raises(LaunchError, match="none had joined"):
            wait_for_machines(resolve({"engine": "join", "num_nodes": 2, "join_timeout": 0.0}, {}).launching)
    # each wait names the same file
    (name,) = set(re.findall(r"It is also in (\S+),", screen.getvalue()))
    path = Path(name)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().strip() == screen.tickets[0]


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"join_address": "0.0.0.0"}, LaunchError, "names no one address"),
        ({"join_address": "192.0.2.1"}, LaunchError, "can't listen there"),
        ({"join_address": "127.0.0.1:x"}, ConfigurationError, "'x' is no port"),
        ({"hosts": "a"}, LaunchError, "hosts='a' was requested with engine='join'"),
    ],
)
def test_settings_that_can_not_be_are_refused_before_anything_waits(
    settings: dict[str, Any], changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        launch(adds_up, **{**settings, **changed})
