"""One contract for every way to start workers: the same calls give the same results, errors, lines and folders."""

import json
import os
import random
import resource
import signal
import sys
import threading
import warnings
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import torch

from accelerate_nb.errors import CheckpointError
from accelerate_nb.transport.worker_spec import NetworkAddress, RankInfo
from tests.contracts import functions
from tests.contracts.places import wait_for_ranks


@pytest.fixture(scope="module")
def torch_settings():
    """Other settings of torch than the usual ones, while a module runs."""
    cudnn = torch.backends.cudnn
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    cudnn.benchmark = cudnn.deterministic = True
    found = functions.torch_settings()
    yield found
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    cudnn.benchmark = cudnn.deterministic = False


@contextmanager
def other_process_settings():
    """Other settings of this process than those in which its supervisor began."""

    class OfTheNotebook(UserWarning):
        """A category that no worker can import."""

    OfTheNotebook.__module__ = "__main__"
    cores, umask, (files, most) = os.sched_getaffinity(0), os.umask(0o27), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.sched_setaffinity(0, {max(cores)})
    resource.setrlimit(resource.RLIMIT_NOFILE, (files - 1, most))
    with warnings.catch_warnings(), np.printoptions(precision=3):
        warnings.filterwarnings("ignore", "noise")
        warnings.simplefilter("ignore", OfTheNotebook)
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    os.sched_setaffinity(0, cores)
    os.umask(umask)


@pytest.fixture(scope="module")
def facts_run(engine, torch_settings):
    """One run that tells what its workers found: the run, and what it ought to have found."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = random.random(), float(np.random.rand()), torch.rand(3).tolist()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with other_process_settings():
        run = engine.launch(functions.facts, (1, "two"), {"three": [3]})
        run.wait(60)
        return run, expected, functions.process_settings()


# ------------------------------------------------------------------------------------------------------------- results


def test_every_rank_returns_its_own_result_and_a_wait_that_of_rank_0(engine):
    run = engine.launch(functions.tensors, results="main")
    assert run.wait(60)["rank"] == 0
    assert [item["rank"] for item in run.results] == list(range(engine.size))
    for result in run.results:
        assert torch.equal(result["base"], torch.arange(functions.LARGE, dtype=torch.float32))
        assert np.array_equal(result["array"], np.arange(12.0).reshape(3, 4).T)
        # what shares memory in a worker shares it here
        assert result["view"].data_ptr() == result["base"][10:].data_ptr()


def test_classes_and_functions_of_a_cell_go_there_and_come_back(engine, cell):
    main = cell(
        "from dataclasses import dataclass\n"
        "scale = 3\n"
        "@dataclass\n"
        "class Point:\n"
        "    x: int\n"
        "def moved(point, far=lambda value: value * scale):\n"
        "    return Point(far(point.x))\n"
    )
    for found in engine.run(main.moved, main.Point(5)):
        assert type(found) is main.Point
        assert found == main.Point(15)


def test_what_workers_do_to_globals_of_the_notebook_stays_with_them(isolated, cell, monkeypatch):
    main = cell(
        "import sys\nseen = []\ndef remember():\n    sys.stdout = seen\n    seen.append(1)\n    return len(seen)\n"
    )
    # what stands in the place of a stream needs no `flush`, here and there
    monkeypatch.setattr(sys, "stdout", None)
    run = isolated.launch(main.remember)
    run.wait(60)
    assert {(glance.state, run.results[glance.rank]) for glance in run.view.glances()} == {("finished", 1)}
    assert (main.seen, sys.stdout) == ([], None)


# -------------------------------------------------------------------------------------------------------- surroundings


def test_workers_know_their_place_by_torchruns_variables(isolated, facts_run):
    # where there are several nodes, each has one of the ranks
    size, nodes = isolated.size, isolated.settings.get("num_nodes", 1)
    meetings = set()
    for rank, found in enumerate(facts_run[0].results):
        environment = found["environment"]
        port, run = environment["MASTER_PORT"], environment["TORCHELASTIC_RUN_ID"]
        local_rank, node = (rank, 0) if nodes == 1 else (0, rank)
        master = NetworkAddress("127.0.0.1", int(port))
        place = RankInfo(rank, size, local_rank, size // nodes, master, run, node, nodes)
        assert environment.items() >= place.environ().items()
        meetings.add((port, run))
    assert len(meetings) == 1


def test_workers_find_the_arguments_folder_path_random_states_and_settings_of_the_notebook(
    engine, facts_run, torch_settings
):
    run, expected, settings = facts_run
    assert len(run.results) == engine.size
    for found in run.results:
        assert (found["args"], found["kwargs"]) == ((1, "two"), {"three": [3]})
        assert (found["folder"], found["path"], found["thread"]) == (os.getcwd(), sys.path, True)
        assert found["drawn"] == expected
        assert found["torch"] == torch_settings
        assert found["process"] == settings


def test_each_worker_leads_a_session_of_its_own(isolated, facts_run):
    sessions = [found["session"] for found in facts_run[0].results]
    assert sessions == [found["pid"] for found in facts_run[0].results]
    assert os.getsid(0) not in sessions


def test_ranks_meet_through_the_environment_alone(isolated):
    total = float(sum(range(1, isolated.size + 1)))
    names = [f"rank {rank}" for rank in range(isolated.size)]
    assert isolated.run(functions.meets_others) == [([total] * 4, names)] * isolated.size


def test_a_notebook_that_has_computed_with_all_threads_can_launch(engine, monkeypatch):
    torch.set_num_threads(2)
    assert functions.computes_in_parallel() == (2, 1200.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert engine.run(functions.computes_in_parallel) == [(2, 1200.0)] * engine.size


def test_workers_read_one_copy_and_write_their_own(isolated):
    tensor, array = torch.zeros(200_000), np.zeros(200_000)
    found = isolated.run(functions.writes_into, tensor, array)
    assert found == [((0.0, 0.0), (rank + 1.0, rank + 1.0)) for rank in range(isolated.size)]
    assert not tensor.any()
    assert not array.any()


# -------------------------------------------------------------------------------------------------------------- output


def test_what_a_rank_prints_is_kept_under_its_rank_and_in_order(isolated, facts_run):
    run = facts_run[0]
    for rank in range(isolated.size):
        expected = [f"début {rank}", *(f"line {number}" for number in range(200)), "from C"]
        seen = run.view.rank(rank).lines
        assert [line.text for line in seen if line.stream == "stdout"] == expected
        assert [line.text for line in seen if line.stream == "stderr"] == ["no newline at the end"]
        assert sorted(run.logs(rank).splitlines()) == sorted([*expected, "no newline at the end"])
        kept = (run.folder / f"rank_{rank}.log").read_bytes()
        assert b"line 198\r\nline 199\n" in kept


def test_what_an_inline_function_prints_appears_here(engine, capfd):
    if engine.isolated:
        pytest.skip("only an inline function prints where this process does")
    engine.run(functions.facts)
    assert capfd.readouterr().out.startswith("début 0\nline 0\r\nline 1\n")


def test_a_run_s_folder_is_complete(engine, facts_run):
    run = facts_run[0]
    status = json.loads((run.folder / "status.json").read_text())
    assert status["state"] == "finished"
    assert status["error"] is None
    assert status["why"] == run.why
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    for rank in range(engine.size):
        states = [event["state"] for event in events if event["type"] == "state_change" and event["rank"] == rank]
        assert states[-2:] == ["running", "finished"]
    logs = {f"rank_{rank}.log" for rank in range(engine.size)} if engine.isolated else set()
    assert {path.name for path in run.folder.iterdir()} == {"status.json", "events.jsonl", "source.txt", *logs}
    assert run.view.state == "finished"


# -------------------------------------------------------------------------------------------------------------- errors


def test_restarts_have_an_end_and_the_folder_records_that_the_run_failed(engine):
    run = engine.launch(functions.raises, (ZeroDivisionError("again"), 0), max_restarts=1)
    with pytest.raises(ZeroDivisionError, match="again"):
        run.wait(60)
    events = (run.folder / "events.jsonl").read_text()
    assert events.count('"ZeroDivisionError"') == 2
    assert '"type":"failure"' in events.replace(" ", "")
    assert json.loads((run.folder / "status.json").read_text())["state"] == "failed"
    assert run.view.failures[0].type == "ZeroDivisionError"


# -------------------------------------------------------------------------------------------------------------- ending


def test_a_group_is_started_again_after_a_failure(engine, tmp_path):
    found = engine.run(functions.fails_the_first_time, str(tmp_path), max_restarts=1)
    assert found == [(1, "1" if engine.isolated else None)] * engine.size
    assert [(tmp_path / f"attempts_{rank}").read_text() for rank in range(engine.size)] == ["xx"] * engine.size


@pytest.mark.usefixtures("facts_run")
def test_nothing_is_left_or_changed_after_runs_that_return_fail_and_are_stopped(engine, tmp_path):
    before = belongings(), environment_and_signals()
    engine.run(functions.tensors)
    with pytest.raises(KeyError):
        engine.run(functions.raises, KeyError("x"), 0)
    if engine.isolated:
        run = engine.launch(functions.waits_stubbornly, (str(tmp_path),), stop_grace_period=0.1)
        wait_for_ranks(run, tmp_path, engine.size)
        run.stop()
    assert (belongings(), environment_and_signals()) == before


def environment_and_signals():
    """What a launch could leave changed in this process."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return dict(os.environ), handlers, os.getcwd(), list(sys.path), signal.set_wakeup_fd(signal.set_wakeup_fd(-1))


def belongings():
    """This process's threads, what its descriptors are, and its children with the workers among theirs."""
    kinds = [os.readlink(f"/proc/self/fd/{descriptor}").partition(":")[0] for descriptor in open_descriptors()]
    child_pids = {child.pid for child in psutil.Process().children()}
    below = {child.pid for child in psutil.Process().children(recursive=True)}
    supervisors = child_pids | {pid for agent in child_pids for pid in supervisors_of(agent)}
    # what a supervisor keeps ready for the next launch comes and goes, in the supervisor's own session
    children = sorted(pid for pid in below if pid in child_pids or session_of(pid) not in {None, *supervisors})
    return sorted(thread.name for thread in threading.enumerate()), sorted(kinds), children


def supervisors_of(pid):
    """The supervisor of a node's agent; none where the process is another one."""
    process = psutil.Process(pid)
    is_agent = "accelerate_nb.launching.node_agent.agent_process" in process.cmdline()
    return [child.pid for child in process.children()] if is_agent else []


def session_of(pid):
    """The session of a process; `None` where it has just ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def open_descriptors():
    return [descriptor for descriptor in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{descriptor}")]


# ----------------------------------------------------------------------------------------------------- what goes on behind


def test_a_checkpoint_that_is_being_written_is_finished_first_and_one_that_fails_fails_the_run(engine, tmp_path):
    folder = tmp_path / "checkpoint"
    run = engine.launch(functions.saves_in_the_background, (str(folder), False))
    run.wait(60)
    assert run.results[0] == []  # nothing was there yet when the function returned
    assert (folder / "model.safetensors").exists()
    run = engine.launch(functions.saves_in_the_background, (str(tmp_path / "checkpoint"), True))
    with pytest.raises(CheckpointError, match="no such folder"):
        run.wait(60)


def test_pools_that_start_anew_find_what_a_cell_defines(isolated, cell, monkeypatch):
    # as a kernel's; a forked worker has this process's
    for name in ("__file__", "__spec__"):
        monkeypatch.setattr(sys.modules["__main__"], name, None, raising=False)
    main = cell(
        "import multiprocessing\n"
        "class Sample:\n    number = 7\n"
        "def sample(_):\n    return Sample()\n"
        "def train():\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        return [type(found) is Sample and found.number for found in pool.map(sample, [1])]\n"
    )
    assert isolated.run(main.train) == [[7]] * isolated.size
