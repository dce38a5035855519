"""An interrupt at whatever moment ends the ranks, and the launch right after it finds everything in order."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accelerate_nb import StoppedError, WorkerError, launch, notebook_launcher
from accelerate_nb.launching.engines import supervisor
from accelerate_nb.worker.main import RankConnection
from tests.contracts import functions
from tests.contracts.places import wait_for_ranks
from tests.waiting import until

TWO = {"num_processes": 2, "cpu": True, "results": "all"}
# `INTERRUPTS=100 pytest tests/launching/test_interrupts.py` interrupts a hundred times.
TIMES = int(os.environ.get("INTERRUPTS", "4"))
MET = [([3.0] * 4, ["rank 0", "rank 1"])] * 2


def computes(folder: str) -> None:
    """Steps of training that never end."""
    dist.init_process_group("gloo")
    Path(folder, f"here_{functions.rank()}").touch()
    weight = torch.ones(200, 200)
    while True:
        weight = (weight @ weight).tanh()
        dist.all_reduce(weight)


def is_stuck_in_a_collective(folder: str) -> None:
    """One rank waits for another one, which never comes and hears no interrupt."""
    dist.init_process_group("gloo")
    Path(folder, f"here_{functions.rank()}").touch()
    if functions.rank() == 1:
        functions.waits_stubbornly(folder)
    dist.barrier()


MOMENTS = {
    "starting": computes,
    "computing": computes,
    "stuck in Python": functions.waits_stubbornly,
    "stuck in a collective": is_stuck_in_a_collective,
}


@pytest.mark.timeout(60 + 5 * TIMES)
def test_after_an_interrupt_at_any_moment_the_next_launch_works(tmp_path):
    seed = time.time_ns()
    draw = random.Random(seed)
    assert notebook_launcher(functions.meets_others, **TWO) == MET
    for number in range(TIMES):
        moment = list(MOMENTS)[number % len(MOMENTS)]
        folder = tmp_path / str(number)
        folder.mkdir()
        run = launch(MOMENTS[moment], (str(folder),), stop_grace_period=0.2, **TWO)
        if moment != "starting":
            wait_for_ranks(run, folder, 2)
        time.sleep(draw.uniform(0, 0.05))  # the moment itself
        run.request_stop("interrupt")
        with pytest.raises(StoppedError):
            run.wait(60)
        assert notebook_launcher(functions.meets_others, **TWO) == MET, f"interrupt {number} ({moment}), seed {seed}"


# --------------------------------------------------------------------------------------------------------- at once after

IDLE_TIME = 2.0


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that a module writes which the supervisor loads when it has had nothing to do for a while."""
    supervisor.cool()
    (tmp_path / "writes_late.py").write_text(f"open({str(tmp_path / 'late')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(supervisor, "_LOADED_WHEN_IDLE", ("writes_late",))
    monkeypatch.setattr(supervisor, "_IDLE_BEFORE_LOADING", IDLE_TIME)
    yield tmp_path / "late"
    supervisor.cool()


@pytest.mark.slow
def test_after_a_long_run_the_supervisor_waits_anew_before_it_loads_what_has_time(late, tmp_path):
    run = launch(functions.waits_stubbornly, (str(tmp_path),), stop_grace_period=0.2, **TWO)
    wait_for_ranks(run, tmp_path, 2)
    time.sleep(IDLE_TIME)  # so long it is to be idle, and is not
    run.request_stop("interrupt")
    ended = time.time()
    with pytest.raises(StoppedError):
        run.wait(60)
    until(late.exists)
    # file systems' clocks are coarse
    assert late.stat().st_mtime - ended > IDLE_TIME - 0.1


class FailsWhileInterrupted(Exception):
    """An error in whose report an interrupt comes, as where another rank has failed at the same time."""

    def __str__(self) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        return "its own words"


def fails_while_interrupted() -> None:
    raise FailsWhileInterrupted


def test_an_interrupt_while_a_failure_is_reported_loses_nothing_of_it():
    with pytest.raises(WorkerError, match="FailsWhileInterrupted: its own words"):
        notebook_launcher(fails_while_interrupted, num_processes=1, cpu=True)


def test_an_interrupt_before_the_function_begins_is_reported_as_one(monkeypatch):
    # a forked worker has what this process has: each message about its state, of which "starting" is the first, interrupts it
    monkeypatch.setattr(RankConnection, "_send_state", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(WorkerError, match="rank 0 stopped with KeyboardInterrupt"):
        notebook_launcher(abs, (-1,), num_processes=1, cpu=True, start_method="fork")
