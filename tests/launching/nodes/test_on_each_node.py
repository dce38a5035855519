"""A run that is launched on each of its nodes: here both are of one process, which meet over its loopback address."""

import os
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelerate_nb import Accelerator, Run, attach, launch
from accelerate_nb.errors import LaunchError, StoppedError, WorkerError
from tests.nodes.trainings import trains, waits
from tests.waiting import until, until_lines

pytestmark = pytest.mark.timeout(60)

LAUNCH = {"cpu": True, "panel": "off", "config_file": "", "num_nodes": 2, "results": "all"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def launched(
    function: Callable[..., Any], args: tuple[Any, ...] = (), *, folder: Path, nodes: int = 2, **settings: Any
) -> list[Run]:
    """The run on all nodes: node 0 is the first."""
    settings = {"num_processes": 1, "use_port": free_port(), "folder": str(folder), **LAUNCH, **settings}

    def node(rank: int) -> Run:
        static = {} if settings.get("rdzv_backend") == "c10d" else {"node_rank": rank}
        return launch(function, args, **{**settings, **static})

    with ThreadPoolExecutor(nodes) as threads:
        runs = list(threads.map(node, range(nodes)))
    return sorted(runs, key=lambda run: run.main_rank)


def begun(function: Callable[..., Any], **settings: Any) -> list[Run]:
    """The same, where a rank of each node has written a line."""
    runs = launched(function, **settings)
    for run in runs:
        until_lines(run, 1)
    return runs


def place() -> tuple[str, ...]:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE")
    print("rank", os.environ["RANK"])
    return tuple(os.environ[name] for name in names)


def raises_on_last() -> None:
    if Accelerator().is_last_process:
        raise KeyError("no such thing")
    time.sleep(600)


def waits_until_three() -> tuple[str, ...]:
    print("begins", flush=True)
    if os.environ["WORLD_SIZE"] == "2" or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(600)
    return tuple(os.environ[name] for name in ("RANK", "GROUP_RANK", "WORLD_SIZE"))


def fails_once() -> str:
    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and accelerator.is_last_process:
        raise RuntimeError("the first time")
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def steps() -> tuple[int, float]:
    """Steps until a stop is requested: their number, and the value of a knob."""
    import torch

    accelerator = Accelerator()
    model, steps = torch.nn.Linear(1, 1), 0
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    knob = accelerator.knob("lr", 0.1, min=0.01, max=1.0)
    while not accelerator.stop_requested:
        if not steps:
            print("begins", flush=True)
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        steps += 1
    return steps, knob.value


def nodes_of(run: Run) -> Any:
    """The nodes of a run as this process sees them."""
    return run._control._nodes  # type: ignore[attr-defined]


def test_each_node_has_its_ranks_and_their_values(tmp_path: Path) -> None:
    host, other = launched(place, folder=tmp_path, num_processes=2)
    # each node has the lines of its own ranks, and the states of all
    assert host.wait() == [("0", "0", "2", "0", "2", "4"), ("1", "1", "2", "0", "2", "4"), None, None]
    assert (host.logs(1), host.logs(3), other.logs(3)) == ("rank 1\n", "", "rank 3\n")
    assert other.wait() == [None, None, ("2", "0", "2", "1", "2", "4"), ("3", "1", "2", "1", "2", "4")]
    for run in (host, other):
        assert [run.view.rank(rank).state for rank in range(4)] == ["finished"] * 4
    assert [(node.label.partition(" on ")[0], node.first, node.last) for node in host.view.nodes] == [
        *(("node 0", 0, 1), ("node 1", 2, 3))
    ]
    assert other.view.nodes == host.view.nodes


def test_as_many_nodes_as_are_needed_which_come_in_any_order_train_to_the_weights_of_one_process(
    tmp_path: Path,
) -> None:
    alone = launch(trains, (3,), num_processes=1, cpu=True, folder=str(tmp_path), panel="off", config_file="").wait()
    fewer = {"num_nodes": "2:3", "rdzv_conf": {"last_call_timeout": 0.5}}
    host, other = launched(trains, (3,), folder=tmp_path, rdzv_backend="c10d", results="main", **fewer)
    assert host.wait() == pytest.approx(alone, abs=1e-6)
    # the value of the node's own first rank
    assert other.wait() == pytest.approx(alone, abs=1e-6)


def test_an_exception_has_its_class_on_its_node_and_its_name_on_the_other(tmp_path: Path) -> None:
    host, other = launched(raises_on_last, folder=tmp_path)
    with pytest.raises(WorkerError, match="rank 1 stopped with KeyError: 'no such thing'") as caught:
        host.wait(40)
    assert caught.value.rank == 1
    assert "raise KeyError" in str(caught.value)
    with pytest.raises(KeyError) as own:
        other.wait(40)
    assert isinstance(own.value, WorkerError)


@pytest.mark.parametrize(
    ("ends", "error", "text"),
    [
        (lambda worker, _: worker.kill(), WorkerError, "rank 0 ended with SIGKILL"),
        (lambda _, other: other.request_stop("interrupt"), StoppedError, "as requested"),
    ],
    ids=["killed", "interrupted"],
)
def test_what_ends_the_ranks_of_one_node_ends_those_of_the_other(
    ends: Callable[..., None], error: type[Exception], text: str, tmp_path: Path
) -> None:
    host, other = begun(waits, folder=tmp_path)
    workers = [psutil.Process(int(run.view.rank(rank).detail)) for rank, run in enumerate((host, other))]
    ends(workers[0], other)
    for run in (host, other):
        with pytest.raises(error, match=text):
            run.wait(40)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def test_all_nodes_start_again_together(tmp_path: Path) -> None:
    host, other = launched(fails_once, folder=tmp_path, max_restarts=1, results="main")
    assert (host.wait(), other.wait()) == ("1", "1")
    assert "the first time" in other.view.restarts[0].reason


def test_nodes_that_are_left_go_on_and_one_that_has_come_takes_part_from_the_next_restart(tmp_path: Path) -> None:
    settings = {"num_nodes": "2:3", "rdzv_backend": "c10d", "max_restarts": 3, "restart_delay": 0.01}
    settings |= {"use_port": free_port()}
    function = waits_until_three
    host, lost, other = begun(function, folder=tmp_path, nodes=3, **settings)
    # the cable is out
    nodes_of(lost)._exchange._socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(LaunchError, match=r"node 0 on \S+ was lost: its connection has ended"):
        lost.wait(40)
    until_lines(host, 2)
    assert (other.main_rank, len(host.view.ranks), len(other.view.nodes)) == (1, 2, 2)
    comes = {**LAUNCH, "num_processes": 1, "folder": str(tmp_path), **settings}
    with pytest.raises(LaunchError, match=r"rdzv_id='other' was given on this node"):
        launch(place, **{**comes, "rdzv_id": "other"})
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(launch, function, **comes)
        until(lambda: nodes_of(host)._waiting)
        psutil.Process(int(host.view.rank(0).detail)).kill()
        # it has the place of the lost one, whatever that was called
        assert host.wait(40) == [("0", "0", "3"), None, None]
        assert late.result().wait(40) == [None, ("1", "1", "3"), None]
    assert other.wait(40) == [None, None, ("2", "2", "3")]
    for run in (host, other):
        fewer, more = run.view.restarts
        assert "2 of 3 ranks start again, on node 0 on" in fewer.reason
        assert re.fullmatch(r"rank 0 ended with SIGKILL.*; node 1 on \S+ has come; 3 ranks start again", more.reason)
        assert len(run.view.ranks) == len(run.view.nodes) == 3


def test_each_node_profiles_ranks_changes_knobs_and_stops_all_after_the_same_step(tmp_path: Path) -> None:
    host, other = runs = begun(steps, folder=tmp_path, results="main")
    until(lambda: host.view.rank(1).state == "running", host)
    host.profile(steps=2)
    until(lambda: all(run.view.rank(rank).profile for run in runs for rank in range(2)), host)
    assert (other.folder / "profile_1_rank_1.json.gz").exists()
    other.set_knob("lr", 0.5)
    until(lambda: [run.view.knobs()["lr"].value for run in runs] == [0.5, 0.5], host)
    other.stop(30)
    host.wait_until_over(30)
    assert host.view.state == other.view.state == "stopped"
    assert host.wait() == other.wait()
    count, lr = host.wait()
    assert count > 0
    assert lr == 0.5


def test_an_error_of_one_node_s_own_process_ends_the_run_for_all(tmp_path: Path) -> None:
    host, other = begun(waits, folder=tmp_path)

    def fails(_: object) -> None:
        raise KeyError("within")

    other._control._worker_group._carry_out = fails  # type: ignore[attr-defined]
    other._control.run_context.wake()  # type: ignore[attr-defined]
    with pytest.raises(KeyError, match="within"):
        other.wait(40)
    with pytest.raises(LaunchError, match=r"node 1 on \S+ has left: KeyError\('within'\)"):
        host.wait(40)


@pytest.mark.slow
def test_a_time_limit_of_node_0_holds_for_all(tmp_path: Path) -> None:
    host, other = launched(waits, folder=tmp_path, timeout=6.0)
    for run in (host, other):
        with pytest.raises(TimeoutError, match=r"(?s)had not ended.*time\.sleep\(600\)"):
            run.wait(40)


def test_nodes_that_do_not_come_are_reported_with_the_endpoint_and_leave_no_run_behind(tmp_path: Path) -> None:
    settings = {**LAUNCH, "use_port": free_port(), "folder": str(tmp_path)}
    for more in ({"rdzv_conf": {"join_timeout": 0.5}}, {"rdzv_conf": {"timeout": 0.5}, "node_rank": 0, "detach": True}):
        with pytest.raises(LaunchError, match=r"after 0\.5 s only 1 had come to 127\.0\.0\.1") as caught:
            launch(place, **settings, **more)
        assert "node 1 did not" in str(caught.value)
        assert "pass master_addr" in str(caught.value)
        assert not [*tmp_path.iterdir()]
    with pytest.raises(
        LaunchError, match=r"after 0.5 s there was no run for this node at 127\.0\.0\.1:\d+: Connection refused"
    ):
        launch(place, **settings, node_rank=1, rdzv_conf={"timeout": 0.5})


@pytest.mark.parametrize("node_rank", [0, 1])
def test_an_endpoint_whose_name_no_host_has_is_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node_rank: int
) -> None:
    monkeypatch.setattr("accelerate_nb.launching.nodes.rendezvous._NAME_TIMEOUT", 0.5)
    settings = {**LAUNCH, "master_addr": "nohost.invalid", "node_rank": node_rank}
    with pytest.raises(LaunchError, match=r"at nohost\.invalid:\d+, and there is no host of that name"):
        launch(place, **settings, use_port=free_port(), folder=str(tmp_path))


def test_a_run_outlives_the_notebooks_of_its_nodes(tmp_path: Path) -> None:
    host, other = launched(steps, folder=tmp_path, detach=True, results="main")
    try:
        until_lines(host, 1)
        # another process of each machine can attach to it
        again = attach(other.folder)
        until(lambda: [node.first for node in again.view.nodes] == [0, 1], again)
        again.request_stop("finish")
        # each has the value of its own first rank
        assert host.wait(40) == other.wait(40) == again.wait(40)
        assert host.wait()[0] > 0
    finally:
        host.request_stop("kill")
    place_host, place_other = launched(place, folder=tmp_path, detach=True)
    assert [run.wait(40)[rank][0] for rank, run in enumerate((place_host, place_other))] == ["0", "1"]
