"""Agents of far machines, which are spoken with over streams, report all that their workers do."""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelerate_nb import LaunchError, Run, launch
from accelerate_nb.config.run_config import resolve
from accelerate_nb.launching.engines.supervisor import SupervisorWorkers
from accelerate_nb.launching.nodes import node_pool
from accelerate_nb.launching.session import Session
from accelerate_nb.transport.channel import Channel
from tests.launching.node_agent.conftest import FarNodes
from tests.nodes.trainings import TWO_NODES, waits
from tests.waiting import TIMEOUT, until, until_lines

pytestmark = pytest.mark.timeout(120)
# Two on the first of two nodes.
RANKS = 3


def prints_and_returns(array: bytes) -> tuple[int, bytes]:
    print("out", os.environ["RANK"])
    print("err", file=sys.stderr)
    return int(os.environ["RANK"]) + 1, array[::-1]


@pytest.fixture
def where(far_nodes: type[FarNodes]) -> dict[str, Any]:
    """The settings of ranks whose agents are spoken with over streams; tests/contracts has the others."""
    return {**TWO_NODES, "num_processes": RANKS, "engine": "local"}


@pytest.fixture
def start(where: dict[str, Any], tmp_path: Path) -> Callable[..., Run]:
    return lambda function, *args: launch(function, args, **where, folder=str(tmp_path), results="all")


def test_what_ranks_write_send_and_end_with_arrives_in_order(start: Callable[..., Run]) -> None:
    array = os.urandom(9 << 20)
    run = start(prints_and_returns, array)
    assert run.wait(TIMEOUT) == [(rank + 1, array[::-1]) for rank in range(RANKS)]
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    for rank in range(RANKS):
        states = [event["state"] for event in events if event["type"] == "state_change" and event["rank"] == rank]
        assert states == ["starting", "starting", "running", "finished"]
        shown = {(line.stream, line.text) for line in run.view.tail(rank, 10)}
        assert shown == {("stdout", f"out {rank}"), ("stderr", "err")}
        assert sorted((run.folder / f"rank_{rank}.log").read_text().splitlines()) == ["err", f"out {rank}"]


def test_stacks_of_all_ranks_are_brought_and_a_stopped_one_is_known_as_such(start: Callable[..., Run]) -> None:
    run = start(waits)
    until_lines(run, RANKS)
    assert run.stacks().count("in waits") == RANKS
    process = psutil.Process(int(run.view.rank(1).detail))
    process.suspend()
    # a signal reaches a process when that is scheduled
    until(lambda: process.status() == psutil.STATUS_STOPPED)
    stacks = run.stacks()
    assert stacks.count("in waits") == RANKS - 1
    assert f"its process {process.pid} is stopped" in stacks
    process.resume()
    run.stop(1)


def test_a_task_of_a_session_is_done_and_its_reply_comes_back(where: dict[str, Any], tmp_path: Path) -> None:
    session = Session.start(resolve({**where, "folder": str(tmp_path), "panel": None}, {}))
    try:
        session.push({"x": [1, 2]}, ranks=[1])
        assert session.pull(["x"], ranks=[1]) == {1: {"x": [1, 2]}}
    finally:
        session.close()


def test_workers_end_with_the_connection_of_their_agent(
    far_nodes: type[FarNodes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_pool.close_nodes()
    run = launch(waits, **TWO_NODES, engine="local", folder=str(tmp_path))
    until_lines(run, 2)
    workers = [psutil.Process(int(run.view.rank(rank).detail)) for rank in range(2)]
    agent = far_nodes.placed[-1]
    assert agent.process is not None
    # it ends by itself
    monkeypatch.setattr(agent.process, "kill", lambda: None)
    agent.channel.shutdown()
    with pytest.raises(LaunchError, match="its connection has ended"):
        run.wait(TIMEOUT)
    assert agent.process.wait(10) == 0
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive


def test_workers_of_a_later_node_that_were_not_forked_yet_end_under_their_own_ranks() -> None:
    near, far = socket.socketpair()
    with far:
        workers = SupervisorWorkers(None, Channel(near), (2, 3))  # type: ignore[arg-type] # it asks for nothing
        workers.kill()
        assert workers.exit_codes() == {2: -9, 3: -9}
        near.close()
