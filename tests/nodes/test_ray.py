"""Two raylets of this machine as the nodes of a Ray cluster."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelerate_nb import launch, notebook_launcher
from accelerate_nb.errors import LaunchError, MissingExtraError, NotYetError
from accelerate_nb.launching.nodes import node_pool
from tests.nodes.conftest import until_lines
from tests.nodes.trainings import trains

pytestmark = pytest.mark.timeout(240)
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
def settings(cluster: Any, tmp_path: Path) -> dict[str, Any]:
    return {
        "num_processes": 2,
        "num_nodes": 2,
        "engine": "ray",
        "address": cluster.address,
        "join_timeout": 60.0,
        "cpu": True,
        "panel": "off",
        "folder": str(tmp_path),
    }


def place() -> tuple[int, list[int]]:
    """The process that forked this one, and the raylet above it."""
    return os.getppid(), [process.pid for process in psutil.Process().parents() if process.name() == "raylet"]


def fails_on_the_second() -> None:
    if int(os.environ["RANK"]) == 1:
        raise ValueError("the second rank failed")


def finds_what_was_sent() -> tuple[str, str]:
    sent = importlib.import_module("sent_along")
    return os.environ["FROM_RAY"], sent.word


def waits() -> None:
    import time

    print("waits", flush=True)
    time.sleep(600)


def test_a_launch_trains_on_two_nodes_stays_warm_and_names_a_lost_agent(
    settings: dict[str, Any],
) -> None:
    alone = launch(trains, (4,), num_processes=1, cpu=True, panel="off", folder=settings["folder"]).wait()
    assert launch(trains, (4,), **settings).wait() == pytest.approx(alone, abs=1e-6)
    first = launch(place, **settings, results="all").wait()
    (_, [one]), (_, [other]) = first
    assert one != other
    assert launch(place, **settings, results="all").wait() == first
    run = launch(fails_on_the_second, **settings)
    with pytest.raises(ValueError, match="the second rank failed"):
        run.wait()
    failure = run.view.rank(1).failure
    assert failure is not None
    assert "in fails_on_the_second" in failure.traceback

    run = launch(waits, **settings)
    until_lines(run, 2)
    worker = psutil.Process(int(run.view.rank(1).detail.split()[-1]))
    next(process for process in worker.parents() if "ray::" in " ".join(process.cmdline())).kill()
    with pytest.raises(LaunchError, match=r"the agent of n[12] \(rank 1\) was lost"):
        run.wait(60)
    # what was reserved with the lost agent is given back
    assert launch(trains, (4,), **settings).wait() == pytest.approx(alone, abs=1e-6)


def test_what_the_cluster_does_not_have_is_said_with_what_it_has(settings: dict[str, Any]) -> None:
    with pytest.raises(
        LaunchError, match=r"(?s)requested on 3 nodes with 1 CPU each, every one.*n1  1 CPU.*n2  1 CPU.*Request less"
    ):
        launch(place, **{**settings, "num_nodes": 3, "num_processes": 3})
    with pytest.raises(LaunchError, match="this process is connected to"):
        launch(place, **{**settings, "address": "127.0.0.1:1"})
    with pytest.raises(NotYetError, match="Ray's client"):
        launch(place, **{**settings, "address": "ray://127.0.0.1:10001"})
    with pytest.raises(NotYetError, match="engine='ray'"):
        notebook_launcher(place, **{**settings, "detach": True})


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


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"accelerate-nb\[ray\]"):
        launch(place, num_processes=2, num_nodes=2, engine="ray", cpu=True, panel="off")
