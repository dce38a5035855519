"""Hosts that ssh reaches are driven from here: the same results, and an error in words for whatever becomes of them."""

import multiprocessing
import os
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelerate_nb import Accelerator, launch
from accelerate_nb.errors import LaunchError, PayloadError
from accelerate_nb.launching.nodes import node_pool
from tests.nodes.hosts import Hosts
from tests.nodes.trainings import agent_of, trains
from tests.processes import python
from tests.waiting import until, until_lines

pytestmark = pytest.mark.timeout(400)
# Seconds until a lost host is told and the others are ended: 4 on an idle machine, where gloo itself waits for half an hour.
LOST_WITHIN = 20.0


def place() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    return {**{name: os.environ[name] for name in names}, "ssh": os.environ.get("SSH_CONNECTION", "")}


def counts(array: Any) -> int:
    return int(array.sum())


def reduces_for_ever() -> None:
    import torch

    accelerator = Accelerator()
    print("begins", flush=True)
    while True:
        accelerator.reduce(torch.ones(1000))


def pid_of_worker(run: Any, rank: int) -> psutil.Process:
    # namespaces of networks share the numbers of processes
    return psutil.Process(int(run.view.rank(rank).detail))


def test_ranks_on_hosts_have_torchrun_s_variables_and_the_interface_between_them(
    hosts: Hosts, settings: dict[str, Any]
) -> None:
    found = launch(place, **{**settings, "num_processes": 3, "hosts": "h1:1,h2", "results": "all"}).wait()
    assert [(item["LOCAL_RANK"], item["LOCAL_WORLD_SIZE"], item["GROUP_RANK"]) for item in found] == [
        ("0", "1", "0"),
        ("0", "2", "1"),
        ("1", "2", "1"),
    ]
    assert {item["MASTER_ADDR"] for item in found} == {hosts.addresses["h1"]}
    assert {item["GLOO_SOCKET_IFNAME"] for item in found} == {"eth0"}
    assert hosts.addresses["h2"] in found[2]["ssh"]


def test_three_hosts_train_to_the_weights_of_one_process(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**settings, "num_processes": 3, "hosts": ["h1", "h2", "h3"]}
    alone = launch(trains, (3,), num_processes=1, cpu=True, folder=str(tmp_path), panel="off").wait()
    assert launch(trains, (3,), **settings).wait() == pytest.approx(alone, abs=1e-6)


def test_a_pipe_of_this_machine_is_refused(settings: dict[str, Any]) -> None:
    near, far = multiprocessing.get_context("spawn").Pipe()
    with near, far, pytest.raises(PayloadError, match="hold a pipe"):
        launch(counts, (near,), **settings)


def test_a_hostfile_and_the_command_line_reach_them(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("h1 slots=1\nh2 slots=1\n")
    (tmp_path / "script.py").write_text(
        "import os\nprint('rank', os.environ['RANK'], 'on node', os.environ['GROUP_RANK'])\n"
    )
    words = ["-m", "accelerate_nb.cli.main", "launch", "--hostfile", tmp_path / "hostfile"]
    words += ["--ssh-command", hosts.ssh_command, "--cpu", "--folder", tmp_path]
    assert "1 on h1, 1 on h2" in python(*words, "--dry-run", tmp_path / "script.py", limit=90).stdout
    done = python(*words, tmp_path / "script.py", limit=90)
    assert done.returncode == 0, done.stderr
    assert "rank 0 on node 0" in done.stdout
    assert "rank 1 on node 1" in done.stdout


def test_a_cut_cable_is_reported_in_seconds_and_the_next_launch_finds_the_host_again(
    hosts: Hosts, settings: dict[str, Any]
) -> None:
    run = launch(reduces_for_ever, **settings)
    until_lines(run, 2)
    lost, kept = agent_of(pid_of_worker(run, 1)), pid_of_worker(run, 0)
    began = time.monotonic()
    with hosts.cut("h2"):
        with pytest.raises(LaunchError, match=r"the agent of h2 \(rank 1\) was lost: nothing came for 4 s"):
            run.wait(30)
        assert time.monotonic() - began < LOST_WITHIN
        assert not kept.is_running()
        with pytest.raises(LaunchError, match="Workers on h2 were requested, and its agent can't be reached"):
            launch(place, **{**settings, "ssh_command": f"{hosts.ssh_command} -o ConnectTimeout=2"})
    # by itself it ends after a minute of silence
    lost.kill()
    assert len(launch(place, **settings, results="all").wait()) == 2


def test_a_lost_host_comes_back_for_a_restart(settings: dict[str, Any]) -> None:
    run = launch(reduces_for_ever, **settings, max_restarts=1)
    until_lines(run, 2)
    first = pid_of_worker(run, 1)
    agent_of(first).kill()
    until(lambda: run.view.restarts and run.view.rank(1).state == "running", run)
    assert "h2" in run.view.restarts[0].reason
    run.stop(1)


def test_a_slow_and_lossy_network_is_no_lost_host(hosts: Hosts, settings: dict[str, Any], tmp_path: Path) -> None:
    alone = launch(trains, (3,), num_processes=1, cpu=True, folder=str(tmp_path), panel="off").wait()
    with hosts.slow("h2", "delay", "40ms", "loss", "3%"):
        assert launch(trains, (3,), **settings).wait() == pytest.approx(alone, abs=1e-6)


def test_a_firewall_is_found_with_its_port_before_anything_starts(hosts: Hosts, settings: dict[str, Any]) -> None:
    node_pool.close_nodes()
    with hosts.firewall("h1"):
        began = time.monotonic()
        run = launch(place, **settings)
        text = rf"h2 can't connect to port \d+ of h1 \({re.escape(hosts.addresses['h1'])}, eth0\): nothing came back for 4 s"
        with pytest.raises(LaunchError, match=text):
            run.wait()
        # with the time that a new agent takes; a connection by itself gives up after two minutes
        assert time.monotonic() - began < 60
    assert len(launch(place, **settings, results="all").wait()) == 2


def test_a_host_that_is_not_there_and_a_python_that_is_none_are_reported(settings: dict[str, Any]) -> None:
    with pytest.raises(LaunchError, match=r"(?s)Workers on nowhere were requested.*exit code 255.*Try `ssh"):
        launch(place, **{**settings, "hosts": "h1,nowhere"})
    with pytest.raises(LaunchError, match=r"(?s)exit code 127.*/no/python"):
        launch(place, **settings, node_python="/no/python")
    with pytest.raises(LaunchError, match="name yours as ssh_command"):
        launch(place, **{**settings, "ssh_command": "no-such-ssh"})
