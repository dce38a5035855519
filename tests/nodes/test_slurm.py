"""Inside an allocation of SLURM, `engine="slurm"` runs on all of its nodes."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.nodes.node_pool import allocated_hosts, tasks_of, used_and_others
from accelerate_nb.launching.nodes.run_nodes import find_nodes
from accelerate_nb.launching.planning.placement import Host
from tests.nodes.slurm import idle_nodes, made_slurm
from tests.processes import python
from tests.waiting import until

pytestmark = pytest.mark.timeout(400)

PLACE = """
import json, os, sys
from accelerate_nb import Accelerator, launch
import torch

def place():
    total = Accelerator().reduce(torch.ones(1))
    names = ("LOCAL_WORLD_SIZE", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES")
    return float(total), {name: os.environ[name] for name in names}

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    found = launch(place, engine="slurm", cpu=True, panel="off", results="all", folder=sys.argv[2], **settings)
    print(json.dumps([found.why, found.wait()]))
"""

LOST = """
import os, subprocess, sys, time
from accelerate_nb import launch

def waits():
    print("waits", flush=True)
    while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(1)
    return os.environ["SLURMD_NODENAME"]

if __name__ == "__main__":
    settings = {"num_processes": 2, "num_nodes": 2, "max_restarts": 1, "results": "all", "panel": "off"}
    run = launch(waits, engine="slurm", cpu=True, folder=sys.argv[1], **settings)
    print(run.why)
    while run.view.line_count < 2:
        time.sleep(0.02)
    subprocess.run("scontrol update nodename=node2 state=down reason=test", shell=True, check=True)
    print(run.wait(30), run.view.restarts[0].reason)
    print(launch(os.getpid, engine="slurm", cpu=True, folder=sys.argv[1], **settings).why)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A SLURM of three nodes."""
    with made_slurm(3, tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def in_allocation(slurm: dict[str, str], request: list[str], script: Path, *arguments: str) -> str:
    """What a script prints inside an allocation."""
    words = ["salloc", "--quiet", *request, sys.executable, str(script), *arguments]
    done = subprocess.run(words, env=slurm, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("request_", "settings", "sizes"),
    [
        (["--nodes=2", "--gpus=4"], {"num_processes": 2}, ["1", "1"]),
        (["--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1"], {}, ["2", "2", "2", "2"]),
    ],
)
def test_ranks_run_on_the_nodes_of_the_allocation_with_all_their_gpus(slurm, tmp_path, request_, settings, sizes):
    (tmp_path / "place.py").write_text(PLACE)
    printed = in_allocation(slurm, request_, tmp_path / "place.py", json.dumps(settings), str(tmp_path))
    why, found = json.loads(printed.splitlines()[-1])
    assert f"{sizes[0]} on node1, {sizes[0]} on node2; forked by agents, which srun reaches" in why
    assert [place["LOCAL_WORLD_SIZE"] for _, place in found] == sizes
    assert {total for total, _ in found} == {float(len(sizes))}
    nodes = [f"node{index // (len(sizes) // 2) + 1}" for index in range(len(sizes))]
    assert [place["SLURMD_NODENAME"] for _, place in found] == nodes
    assert {place["CUDA_VISIBLE_DEVICES"] for _, place in found} == {"0,1"}


def test_a_node_beyond_those_that_are_used_takes_the_place_of_one_that_is_lost(slurm, tmp_path):
    (tmp_path / "lost.py").write_text(LOST)
    printed = in_allocation(slurm, ["--nodes=3", "--no-kill"], tmp_path / "lost.py", str(tmp_path))
    assert "1 on node1, 1 on node2; " in printed
    assert "['node1', 'node3'] node node2 was lost; rank 1 starts again on node3" in printed
    assert "1 on node1, 1 on node3; " in printed


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 3),
        ({"num_nodes": 2}, 2),
        ({"num_nodes": 2, "num_processes": 4}, 2),
        ({"num_nodes": "2:3", "max_restarts": 1}, 3),
        # as srun, which needs no more nodes than tasks
        ({"num_processes": 2}, 2),
        ({"num_processes": 4}, 3),
    ],
)
def test_the_first_nodes_of_an_allocation_are_used(settings, count):
    allocated = tuple(map(Host, ("a", "b", "c")))
    config = resolve({"engine": "slurm", **settings}, {}).launching
    assert used_and_others(config, allocated) == (allocated[:count], allocated[count:])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_nodes": 4}, "the allocation has 3 nodes.*salloc --nodes=4"),
        ({"num_nodes": 3, "num_processes": 2}, "num_processes=2 was requested on num_nodes=3"),
    ],
)
def test_numbers_that_do_not_fit_an_allocation_are_refused(settings, text):
    config = resolve({"engine": "slurm", **settings}, {}).launching
    with pytest.raises(LaunchError, match=text):
        used_and_others(config, tuple(map(Host, ("a", "b", "c"))))


def test_outside_of_an_allocation_it_is_refused(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(LaunchError, match=r"outside of an allocation.*salloc"):
        find_nodes(resolve({"engine": "slurm"}, {}))
    with pytest.raises(LaunchError, match="SLURM can't show"):
        allocated_hosts({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "[["}, None)


def test_tasks_are_read_as_slurm_writes_them():
    assert (tasks_of("2(x3),1"), tasks_of("")) == ([2, 2, 2, 1], [])


COMMAND = ("-m", "accelerate_nb.cli.main")
SAVES = """
import sys
import torch
from accelerate_nb import Accelerator
from accelerate_nb.utils import ProjectConfiguration

accelerator = Accelerator(project_config=ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True))
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
resumed = accelerator.resume()
print("resumed" if resumed else "begins", flush=True)
while not resumed and not accelerator.stop_requested:
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
if not resumed:
    accelerator.save_state()
"""


def until_printed(folder: Path, text: str, count: int) -> None:
    """Wait until the ranks of a job have printed a text so many times."""
    deadline = time.monotonic() + 80
    while sum(path.read_text().count(text) for path in folder.glob("*/rank_*.log")) < count:
        log = folder.with_suffix(".log")
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.05)


def submitted(slurm: dict[str, str], folder: Path, *words: str) -> str:
    """The number of a job of two ranks that runs `saves.py`."""
    (folder / "saves.py").write_text(SAVES)
    words = (*COMMAND, "launch", "--slurm", *words, "--cpu", "-n", "2", "--folder", str(folder / "runs"))
    done = python(*words, "saves.py", folder / "checkpoints", folder=folder, limit=60, check=True, **slurm)
    return done.stdout.split()[1]


def until_idle(slurm: dict[str, str], is_so: Callable[[], bool] = lambda: True) -> None:
    """Wait until no node has anything to do, and something else is so."""
    until(lambda: is_so() and idle_nodes(slurm) == 3, timeout=40)


def test_a_job_that_its_time_limit_stops_saves_and_goes_on_when_it_comes_again(slurm, tmp_path):
    number = submitted(slurm, tmp_path, "--nodes", "2", "--requeue")
    folder = tmp_path / "runs" / f"slurm_{number}"

    def of_scontrol(*words: str) -> str:
        done = subprocess.run(["scontrol", *words], env=slurm, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout

    until_printed(folder, "begins", 2)
    # what SLURM does before a time limit
    subprocess.run(["scancel", "--batch", "--signal=USR1", number], env=slurm, check=True, timeout=20)
    until_idle(slurm, lambda: "Reason=BeginTime" in of_scontrol("show", "job", number))
    # By itself it begins after two minutes. In the second of its end slurmd refuses it ("already killed, do not launch batch job").
    of_scontrol("update", f"jobid={number}", "StartTime=now+3")
    until_printed(folder, "resumed", 2)
    shown = python(*COMMAND, "runs", "attach", "--folder", folder, limit=60, **slurm)
    assert shown.returncode == 0, shown.stderr
    assert "resumed" in shown.stdout


ATTACHES = """
import socket, sys
# as on a login node
socket.gethostname = lambda: "login"
from accelerate_nb import attach

run = attach(folder=sys.argv[1])
print("stacks of", "rank 1" in run.stacks(), flush=True)
run.stop()
print(run.view.state, run.results)
"""


def test_a_job_is_stopped_and_its_stacks_are_read_from_another_machine(slurm, tmp_path):
    (tmp_path / "attaches.py").write_text(ATTACHES)
    folder = tmp_path / "runs" / f"slurm_{submitted(slurm, tmp_path, '--nodes', '2', '--sbatch', 'gpus=4')}"
    until_printed(folder, "begins", 2)
    shown = python("attaches.py", folder, folder=tmp_path, limit=80, **slurm)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines() == ["stacks of True", "stopped [None, None]"]
    assert (tmp_path / "checkpoints").exists()
    until_idle(slurm)
