"""Two raylets of this machine as the nodes of a Ray cluster."""

import importlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelerate_nb import Run, attach, launch, runs
from accelerate_nb.errors import LaunchError, MissingExtraError, NotYetError, StoppedError
from accelerate_nb.launching.nodes import node_pool, ray as ray_nodes
from tests.launching.detached.trainings import host_of, until_gone
from tests.nodes.trainings import LAUNCHES_DETACHED, TWO_NODES, trains, waits
from tests.waiting import until, until_lines

pytestmark = pytest.mark.timeout(400)
MEMORY = 80 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster with one processor on each of two nodes."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install ray")
    head = {"num_cpus": 1, "node_name": "n1", "include_dashboard": False, "object_store_memory": MEMORY}
    try:
        made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        made.add_node(num_cpus=1, node_name="n2", object_store_memory=MEMORY)
    except Exception as error:
        # whatever keeps Ray's own processes from starting
        pytest.skip(f"Ray can't be started on this machine: {error}")
    yield made
    import ray

    node_pool.close_nodes()
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def settings(cluster: Any, tmp_path: Path) -> Iterator[dict[str, Any]]:
    ray = {"engine": "ray", "address": f"localhost:{cluster.address.rpartition(':')[2]}", "join_timeout": 60.0}
    yield {**TWO_NODES, **ray, "folder": str(tmp_path)}
    for kept in runs(tmp_path):
        if kept.is_detached and not kept.is_over:
            host_of(kept.folder).kill()


def place() -> tuple[int, list[int]]:
    """The process that forked this one, and the raylet above it."""
    return os.getppid(), [process.pid for process in psutil.Process().parents() if process.name() == "raylet"]


def fails_on_the_second() -> None:
    if int(os.environ["RANK"]) == 1:
        raise ValueError("the second rank failed")


def finds_what_was_sent() -> tuple[str, str]:
    sent = importlib.import_module("sent_along")
    return os.environ["FROM_RAY"], sent.word


class InterruptedWithoutRoom(io.StringIO):
    """Standard error that interrupts once the cluster has no room."""

    def write(self, text: str) -> int:
        if "has no room yet" in text:
            raise KeyboardInterrupt
        return len(text)


class Holder:
    """An actor that only takes up room."""


def has_reservation() -> bool:
    """Whether something in the cluster is reserved, or waits for it."""
    from ray.util import placement_group_table

    return any(group["state"] != "REMOVED" for group in placement_group_table().values())


def test_a_launch_trains_on_two_nodes_stays_warm_and_names_a_lost_agent(settings: dict[str, Any]) -> None:
    alone = launch(trains, (4,), num_processes=1, cpu=True, panel="off", folder=settings["folder"]).wait()
    assert launch(trains, (4,), **settings).wait() == pytest.approx(alone, abs=1e-6)
    first = launch(place, **settings, results="all").wait()
    (_, [one]), (_, [other]) = first
    assert one != other
    assert launch(place, **settings, results="all").wait() == first
    run = launch(fails_on_the_second, **settings)
    with pytest.raises(ValueError, match="the second rank failed"):
        run.wait()
    assert "in fails_on_the_second" in run.view.rank(1).failure.traceback

    # Ray blocks interrupts in the threads of its actors
    run = launch(waits, **settings)
    until_lines(run, 2)
    run.request_stop("interrupt")
    with pytest.raises(StoppedError):
        run.wait(60)
    assert [run.view.rank(rank).failure.type for rank in (0, 1)] == ["KeyboardInterrupt"] * 2

    run = launch(waits, **settings)
    until_lines(run, 2)
    worker = psutil.Process(int(run.view.rank(1).detail.split()[-1]))
    next(process for process in worker.parents() if "ray::" in " ".join(process.cmdline())).kill()
    with pytest.raises(LaunchError, match=r"the agent of n[12] \(rank 1\) was lost"):
        run.wait(60)
    # what was reserved with the lost agent is given back
    assert launch(trains, (4,), **settings).wait() == pytest.approx(alone, abs=1e-6)


def test_what_the_cluster_does_not_have_is_reported_with_what_it_has(settings: dict[str, Any]) -> None:
    text = r"(?s)requested on 3 nodes with 1 CPU each, every one.*n1  1 CPU.*n2  1 CPU.*Request less"
    with pytest.raises(LaunchError, match=text):
        launch(place, **{**settings, "num_nodes": 3, "num_processes": 3})
    with pytest.raises(LaunchError, match="this process is connected to"):
        launch(place, **{**settings, "address": "127.0.0.1:1"})
    with pytest.raises(NotYetError, match="Ray's client"):
        launch(place, **{**settings, "address": "ray://127.0.0.1:10001"})


def test_a_detached_run_outlives_its_launcher_and_gives_its_place_back(settings: dict[str, Any]) -> None:
    import ray

    # gives back what this process has reserved
    ray.shutdown()
    ray.init(address=settings["address"], log_to_driver=False)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHES_DETACHED, json.dumps(settings)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert launcher.stdout is not None
    folder = Path(launcher.stdout.readline().decode().strip())
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    run = attach(folder)
    until_lines(run.start(), 2)
    until(lambda: {node.name for node in run.view.nodes} == {"n1", "n2"}, run)
    until(lambda: all(glance.detail for glance in run.view.glances()))
    workers = [psutil.Process(int(glance.detail.split()[-1])) for glance in run.view.glances()]
    assert "in waits" in run.stacks()
    assert has_reservation()
    run.request_stop("kill")
    with pytest.raises(StoppedError):
        run.wait(60)
    until(lambda: not has_reservation())
    until_gone(workers)


def test_a_detached_run_that_can_not_start_raises_the_error_in_the_cell_and_leaves_nothing(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings |= {"detach": True}
    with pytest.raises(LaunchError, match=r"(?s)requested on 3 nodes with 1 CPU each.*n1  1 CPU.*Request less"):
        launch(place, **{**settings, "num_nodes": 3, "num_processes": 3})
    import ray

    holder = ray.remote(Holder).options(num_cpus=1).remote()
    ray.get(holder.__ray_ready__.remote())
    with pytest.raises(LaunchError, match="still had no room"):
        launch(place, **{**settings, "join_timeout": 1.0})
    # a node that leaves while it is waited for
    found = iter([True])
    monkeypatch.setattr(ray_nodes, "_can_hold", lambda *_: next(found, False))
    with pytest.raises(LaunchError, match="Request less"):
        launch(place, **{**settings, "detach": False})
    monkeypatch.setattr(sys, "stderr", InterruptedWithoutRoom())
    with pytest.raises(KeyboardInterrupt):
        launch(place, **settings)
    ray.kill(holder)
    assert os.listdir(settings["folder"]) == []
    until(lambda: not has_reservation())


def test_a_runtime_environment_holds_for_the_ranks(settings: dict[str, Any], tmp_path: Path) -> None:
    import ray

    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "sent_along.py").write_text("word = 'from the folder'\n")
    node_pool.close_nodes()
    ray.shutdown()
    environment = {"env_vars": {"FROM_RAY": "from the variables"}, "working_dir": str(tmp_path / "sent")}
    ray.init(address=settings["address"], runtime_env=environment, log_to_driver=False)
    expected = ("from the variables", "from the folder")
    assert launch(finds_what_was_sent, **settings, results="all").wait() == [expected] * 2
    # what this process has reserved is given back for it
    assert launch(finds_what_was_sent, **settings, results="all", detach=True).wait() == [expected] * 2


def trains_after_a_loss() -> list[float]:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        waits()
    return trains(4)


def lose_a_node(cluster: Any, run: Run) -> tuple[str, str]:
    """Kill the raylet of a node that has a rank, and is not the head; returns its name and that of the other node."""
    until_lines(run, 2)
    import ray

    other, name = sorted(node.name for node in run.view.nodes)
    ids = [node["NodeID"] for node in ray.nodes() if node["NodeName"] == name]
    cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id in ids), allow_graceful=False)
    return name, other


def test_a_lost_node_is_replaced_by_another_of_the_cluster_or_left_out(cluster: Any, settings: dict[str, Any]) -> None:
    alone = launch(trains, (4,), num_processes=1, cpu=True, panel="off", folder=settings["folder"]).wait()
    cluster.add_node(num_cpus=1, node_name="n3", object_store_memory=MEMORY)
    settings |= {"max_restarts": 1}
    run = launch(trains_after_a_loss, **settings)
    lost, left = lose_a_node(cluster, run)
    assert run.wait() == pytest.approx(alone, abs=1e-6)
    (third,) = {"n1", "n2", "n3"} - {lost, left}
    assert {node.name for node in run.view.nodes} == {left, third}
    assert f"node {lost} was lost; rank" in run.view.restarts[0].reason
    assert run.view.restarts[0].reason.endswith(f"starts again on {third}")
    # two nodes are left, and then one
    run = launch(trains_after_a_loss, **{**settings, "num_nodes": "1:2"})
    lost, _ = lose_a_node(cluster, run)
    assert run.wait() == pytest.approx(alone, abs=1e-6)
    assert run.view.restarts[0].reason == f"node {lost} was lost; 1 of 2 ranks starts again, on n1"


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"accelerate-nb\[ray\]"):
        launch(place, **TWO_NODES, engine="ray")
