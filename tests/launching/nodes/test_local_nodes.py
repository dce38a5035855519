"""A run on several nodes is one run: what happens to a node is told with its name and its ranks."""

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelerate_nb import Accelerator, Run, attach, launch
from accelerate_nb.errors import LaunchError
from accelerate_nb.events.event_types import NodeRanks
from accelerate_nb.events.run_reader import kept_run, view_of
from accelerate_nb.launching.nodes import node_pool
from accelerate_nb.launching.nodes.node_pool import LocalNodes
from tests.nodes.trainings import TWO_NODES, agent_of, trains
from tests.waiting import TIMEOUT, until, until_lines

pytestmark = pytest.mark.timeout(120)


def waits_in_a_collective() -> None:
    import torch

    accelerator = Accelerator()
    print("waits", flush=True)
    if accelerator.process_index == 1:
        time.sleep(600)
    accelerator.reduce(torch.ones(1))


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {**TWO_NODES, "engine": "local", "folder": str(tmp_path)}


@pytest.fixture(autouse=True, scope="module")
def cold() -> Iterator[None]:
    """No agent is left for other tests."""
    yield
    node_pool.close_nodes()


def until_all_wait(run: Run) -> None:
    """Until each rank has written a line, and each node has told its load."""
    until_lines(run, 2)
    until(lambda: len(run.view.node_loads) == 2, run)


def agents() -> list[psutil.Process]:
    """The processes of this process's agents, in the order in which they were started."""
    running = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    found = [child for child in running if any("agent_process" in word for word in child.cmdline())]
    return sorted(found, key=lambda process: process.pid)


def test_two_nodes_train_to_the_weights_of_one_process(settings: dict[str, Any]) -> None:
    alone = launch(trains, (5,), num_processes=1, cpu=True, folder=settings["folder"], panel="off").wait()
    run = launch(trains, (5,), **settings)
    assert run.wait() == pytest.approx(alone, abs=1e-6)
    # also for who reads the run's folder later
    saved = kept_run(run.folder)
    assert saved is not None
    assert run.view.nodes == view_of(saved).nodes == (NodeRanks(0, "node 0", 0, 0), NodeRanks(1, "node 1", 1, 1))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_node_whose_agent_is_killed_or_paused_is_lost_with_its_ranks(settings: dict[str, Any], number: int) -> None:
    run = launch(waits_in_a_collective, **settings)
    until_all_wait(run)
    workers = [psutil.Process(int(run.view.rank(rank).detail)) for rank in range(2)]
    assert all(sample.node == node and sample.memory[1] > 0 for node, sample in run.view.node_loads.items())
    agent = agent_of(workers[1])
    agent.send_signal(number)
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"the agent of node 1 \(rank 1\) was lost") as caught:
        run.wait(TIMEOUT)
    # 5 s are promised until it is told, on a machine that does nothing else; gloo itself waits for half an hour
    assert time.monotonic() - began < 20
    assert ("its connection has ended" if number == signal.SIGKILL else "nothing came for 4 s") in str(caught.value)
    assert run.view.rank(1).state == "failed"
    assert "node 1" in run.view.rank(1).detail
    assert "node 1 (rank 1)" in run.view.detail
    # nobody knows of a signal, or of memory that has run out
    *_, last = (failure for failure in run.view.failures if not failure.ended_by_us)
    assert (last.rank, last.type) == (1, "NodeLost")
    # what it was on this machine was killed
    _, alive = psutil.wait_procs([agent, *workers], timeout=10)
    assert not alive


@pytest.mark.slow
def test_a_run_on_nodes_outlives_the_process_that_launched_it(settings: dict[str, Any]) -> None:
    run = launch(trains, (2,), **settings, detach=True)
    found = attach(run.folder)
    assert len(found.wait()) == 5


@pytest.mark.slow
def test_agents_stay_for_the_next_run_and_two_runs_have_two_of_them(settings: dict[str, Any]) -> None:
    launch(trains, (1,), **settings).wait()
    before = {agent.pid for agent in agents()}
    run = launch(waits_in_a_collective, **settings)
    until_all_wait(run)
    assert {agent.pid for agent in agents()} == before
    assert len(launch(trains, (1,), **settings).wait()) == 5
    assert len(agents()) == len(before) + 2
    run.stop(1)


@pytest.mark.slow
def test_events_have_the_time_of_this_machine_whatever_a_node_s_clock_shows(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    node_pool.close_nodes()
    (connection,) = node_pool.lease(LocalNodes(), ["node 1"])
    # a clock can't be set for one process: an hour ahead is what is known of it, and what comes is as much too late
    connection.clock_offset = 3600.0
    monkeypatch.setattr(connection, "refresh", lambda: None)
    node_pool.release(connection, is_usable=True)
    before = time.time()
    run = launch(trains, (1,), **settings)
    run.wait()
    events = map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
    times = {
        event["rank"]: event["time"]
        for event in events
        if event["type"] == "state_change" and event["state"] == "finished"
    }
    assert times[0] > before
    assert times[1] < before - 3500
    node_pool.close_nodes()


def test_a_node_that_can_not_be_started_is_named_with_what_it_wrote(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    node_pool.close_nodes()
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(LaunchError, match=re.escape("its agent can't be reached: exit code 1")):
        launch(trains, (1,), **settings)
