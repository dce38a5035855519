"""Agents report all that their workers do, in an order that each rank's numbers show, in whatever process they are."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelerate_nb.events.event_types import StateChange, TaskDone
from accelerate_nb.events.run_folder import RunRecorder, new_folder
from accelerate_nb.events.run_state import RunState
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.launching.engines.supervisor import SupervisorWorkers, supervised_workers
from accelerate_nb.launching.group_runner import AgentFactory, GroupRunner, RunContext
from accelerate_nb.launching.node_agent.agent import NodeAgent
from accelerate_nb.launching.node_agent.remote_agent import RemoteAgent
from accelerate_nb.launching.planning.placement import LaunchPlan
from accelerate_nb.launching.session import read_reply, write_request
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import VERSION, BeginTask, CloseSession, KillGroup, QueryNode, RankExited
from accelerate_nb.transport.payload import FunctionCall, pack
from accelerate_nb.transport.session_tasks import PullNames, PushNames
from accelerate_nb.transport.worker_spec import current_environment, on_interface
from accelerate_nb.worker.session import task_loop
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)
TIMEOUT = 60.0


def prints_and_returns(array: bytes) -> tuple[int, bytes]:
    print("out", os.environ["RANK"])
    print("err", file=sys.stderr)
    return int(os.environ["RANK"]) + 1, array[::-1]


def waits() -> None:
    print("waits", flush=True)
    while True:
        time.sleep(0.05)


def crashes_on_one_rank() -> None:
    import faulthandler

    if os.environ["RANK"] == "0":
        waits()
    faulthandler._sigsegv()  # type: ignore[attr-defined]


class AgentProcess:
    """A node's agent as a process on this machine, and this end of its channel."""

    def __init__(self, family: socket.AddressFamily) -> None:
        near, far = connected(family)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "accelerate_nb.launching.node_agent.agent_process", str(far.fileno())],
            pass_fds=[far.fileno()],
        )
        far.close()
        self.channel = Channel(near)
        # as in a launch: a busy machine takes longer to import torch than an agent may be silent
        self.channel.send(QueryNode())
        assert self.channel.receive(TIMEOUT) is not None

    def __enter__(self) -> AgentProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.process.wait(TIMEOUT)

    def workers(self) -> list[psutil.Process]:
        """The processes of its workers, and the one that forks them."""
        return psutil.Process(self.process.pid).children(recursive=True)


def connected(family: socket.AddressFamily) -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection."""
    if family == socket.AF_UNIX:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


class Group:
    """A worker group over some agents, whose run is kept in a folder."""

    def __init__(
        self, call: FunctionCall, agents: Sequence[Channel | None], folder: Path, sizes: tuple[int, ...]
    ) -> None:
        self.states: list[StateChange] = []
        # the tasks that ranks have done
        self.done: list[tuple[int, int]] = []
        self.view = RunState(sum(sizes))
        self.record = RunRecorder(new_folder(folder, "agent"))
        self.context = RunContext(self.view, self.record, CellSources({}, {}), None, 2.0, on_event=self.on_event)
        self.payload = payload = pack(call)
        environment = current_environment(on_interface(), 1)
        plan = LaunchPlan(payload, sum(sizes), environment, run="agent", node_sizes=sizes)
        factories: list[AgentFactory] = [
            partial(NodeAgent, supervised_workers) if channel is None else partial(RemoteAgent, channel)
            for channel in agents
        ]
        self.runner = GroupRunner(plan, factories, self.context, 0)
        self.rank_results: tuple[RankResult, ...] = ()
        self._thread = threading.Thread(target=self._follow)

    def on_event(self, event: Any) -> None:
        if isinstance(event, StateChange):
            self.states.append(event)
        if isinstance(event, TaskDone):
            self.done.append((event.rank, event.number))

    def _follow(self) -> None:
        self.rank_results = self.runner.follow()
        self.record.close()

    def __enter__(self) -> Group:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.stop("kill")
        self._thread.join(TIMEOUT)
        self.payload.close()

    def end(self) -> tuple[RankResult, ...]:
        """Wait for the end."""
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        return self.rank_results

    def states_of(self, rank: int) -> list[str]:
        return [change.state for change in self.states if change.rank == rank]


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Channel]]:
    """Two agents in processes of their own, one over a Unix socket, one over TCP, which are used by one group after the other."""
    with AgentProcess(socket.AF_UNIX) as first, AgentProcess(socket.AF_INET) as second:
        yield [first.channel, second.channel]


@pytest.fixture(params=["in this process", "over a Unix socket", "over TCP", "two nodes"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Group]]:
    """Starts a group of two ranks on each choice of agents."""
    where: str = request.param
    agents: Sequence[Channel | None] = [None]
    if where != "in this process":
        pair: list[Channel] = request.getfixturevalue("processes")
        agents = {"over a Unix socket": pair[:1], "over TCP": pair[1:], "two nodes": pair}[where]
    sizes = (1, 1) if len(agents) == 2 else (2,)
    with ExitStack() as stack:
        yield lambda function, *args: stack.enter_context(Group(FunctionCall(function, args), agents, tmp_path, sizes))


def test_what_ranks_write_send_and_end_with_arrives_in_order(start: Callable[..., Group]) -> None:
    array = os.urandom(9 << 20)
    group = start(prints_and_returns, array)
    rank_results = group.end()
    assert [item.value for item in rank_results] == [(1, array[::-1]), (2, array[::-1])]
    for rank in range(2):
        assert group.states_of(rank) == ["starting", "starting", "running", "finished"]
        shown = {(line.stream, line.text) for line in group.view.tail(rank, 10)}
        assert shown == {("stdout", f"out {rank}"), ("stderr", "err")}
        assert sorted((group.record.folder / f"rank_{rank}.log").read_text().splitlines()) == ["err", f"out {rank}"]


def test_a_crash_of_compiled_code_is_reported_with_its_stack(start: Callable[..., Group]) -> None:
    failure = start(crashes_on_one_rank).end()[1].failure
    assert failure is not None
    assert failure.type == "SIGSEGV"
    assert "in crashes_on_one_rank" in failure.traceback


def test_stacks_of_all_ranks_are_brought_while_they_run_and_a_stopped_one_is_known_as_such(
    start: Callable[..., Group],
) -> None:
    group = start(waits)
    until(lambda: group.view.line_count == 2)
    stacks = group.runner.snapshot().replies
    assert sorted(stacks) == [0, 1]
    assert all("in waits" in text for text in stacks.values())
    process = psutil.Process(int(group.view.rank(1).detail))
    process.suspend()
    stacks = group.runner.snapshot().replies
    assert "in waits" in stacks[0]
    assert stacks[1].startswith(f"its process {process.pid} is stopped")
    process.resume()
    group.runner.stop("kill")
    assert all(item.failure is not None and item.failure.ended_by_us for item in group.end())


def test_a_task_of_a_session_is_done_and_its_reply_comes_back(start: Callable[..., Group]) -> None:
    group = start(task_loop.session)
    until(lambda: len(group.done) == 2)
    for number, task in enumerate((PushNames({"x": [1, 2]}), PullNames(("x",))), 1):
        request = write_request(task)
        group.runner.send(1, BeginTask(number, None, ()), [request])
        os.close(request)
        until(lambda number=number: (1, number) in group.done)
        reply = read_reply(group.runner.task_reply(1, number), 1)
        assert reply.failure is None
    assert reply.value == {"x": [1, 2]}
    for rank in range(2):
        group.runner.send(rank, CloseSession())
    assert [item.failure for item in group.end()] == [None, None]


def test_workers_end_with_the_connection_of_their_agent(tmp_path: Path) -> None:
    agent = AgentProcess(socket.AF_INET)
    with Group(FunctionCall(waits), [agent.channel], tmp_path, (2,)) as group:
        until(lambda: group.view.line_count == 2)
        workers = agent.workers()
        agent.channel.shutdown()
        group.end()
    assert agent.process.wait(10) == 0
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
    agent.channel.close()


def test_an_agent_of_another_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    near, far = socket.socketpair()
    with far, closing(Channel(near)) as channel:
        # a stand-in: there is no other version of this package to install here
        far.sendall(struct.pack("<4sHHI", b"\x93ANB", VERSION + 1, 0, 2) + b"{}")
        with Group(FunctionCall(waits), [channel], tmp_path, (1,)) as group:
            group.end()
        assert f"version {VERSION + 1}" in (group.runner.group.lost or "")


def test_reports_about_ranks_of_another_agent_are_refused(tmp_path: Path) -> None:
    near, far = socket.socketpair()
    with closing(Channel(far)) as agent, closing(Channel(near)) as channel:
        with Group(FunctionCall(waits), [channel], tmp_path, (1,)) as group:
            agent.send(RankExited(7, 0, 0, 1.0))
            agent.send(KillGroup())
            agent.shutdown()
            group.end()
        assert channel.refused == 2


def test_workers_of_a_later_node_that_were_not_forked_yet_end_under_their_own_ranks() -> None:
    near, far = socket.socketpair()
    with far:
        workers = SupervisorWorkers(None, Channel(near), (2, 3))  # type: ignore[arg-type] # it asks for nothing
        workers.kill()
        assert workers.exit_codes() == {2: -9, 3: -9}
        near.close()
