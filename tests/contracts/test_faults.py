"""One contract for whatever runs functions on ranks, engines and sessions alike: no fault is lost, and none spreads."""

import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accelerate_nb import HangError, WorkerError
from accelerate_nb.errors import PayloadError
from tests.contracts import functions
from tests.contracts.places import SessionExecutor, wait_for_ranks
from tests.waiting import until

# What is raised where an interrupt was asked for: by a run, by a session, by a session that it did not reach.
ENDED = (WorkerError, KeyboardInterrupt, HangError)


def test_a_worker_s_error_is_raised_here_with_its_rank_and_type(executor):
    last = executor.size - 1
    with pytest.raises(KeyError, match=f"rank {last} stopped with KeyError: 'digits'") as caught:
        executor.run(functions.raises, KeyError("digits"), last)
    error = caught.value
    assert isinstance(error, WorkerError)
    assert isinstance(error, ChildFailedError)  # code that catches torch's error for failed children catches ours
    assert error.rank == last
    assert error.args == ("digits",)
    assert [failure.rank for failure in error.failures if not failure.ended_by_us] == [last]
    assert "in raises" in str(error)
    assert len(str(error).splitlines()) < 40


def test_an_error_defined_in_a_cell_is_caught_by_its_class_and_shows_the_cell_s_lines(executor, cell):
    main = cell(
        "class Diverged(Exception):\n"
        "    def __init__(self, loss, step):\n"
        "        super().__init__(f'loss {loss}')\n"
        "        self.step = step\n"
        "def train():\n"
        "    raise Diverged(0.5, 12)  # the line\n"
    )
    with pytest.raises(main.Diverged) as caught:
        executor.run(main.train)
    assert caught.value.step == 12
    assert "raise Diverged(0.5, 12)  # the line" in str(caught.value)
    assert isinstance(caught.value, WorkerError)


@pytest.mark.parametrize("closes_first", [False, True])
def test_the_cause_leads_and_not_the_rank_that_lost_its_connection(apart, closes_first):
    with pytest.raises(LookupError, match="the cause") as caught:
        apart.run(functions.loses_connection, closes_first)
    assert caught.value.rank == apart.size - 1


def test_leaving_with_a_code_is_a_failure_that_does_not_end_this_process_and_without_one_is_none(executor):
    with pytest.raises(WorkerError, match="stopped with SystemExit: 3") as caught:
        executor.run(functions.leaves_early, 3)
    assert not isinstance(caught.value, SystemExit)
    assert executor.run(functions.leaves_early, 0) == [None] * executor.size


@pytest.mark.parametrize(("how", "name"), [("exit", "exit code 3"), ("kill", "SIGKILL"), ("segfault", "SIGSEGV")])
def test_a_process_that_dies_names_its_code_or_signal_and_its_last_words(apart, how, name):
    last = apart.size - 1
    with pytest.raises(WorkerError, match=f"rank {last} ended with {name}") as caught:
        apart.run(functions.dies, how)
    assert caught.value.rank == last
    assert str(caught.value).count(name) == 1
    assert "last words" in str(caught.value)
    (failure,) = [failure for failure in caught.value.failures if failure.rank == last]
    # the stack of compiled code, which its own process could still write
    assert ("in dies" in failure.traceback) == (how == "segfault")


def test_a_rank_that_is_killed_is_named_also_where_the_others_have_to_be_killed(apart, tmp_path):
    run = apart.launch(functions.is_killed_among_deaf_ones, (str(tmp_path),))
    with pytest.raises(WorkerError, match=f"rank {apart.size - 1} ended with SIGKILL: it was killed from outside"):
        run.wait()


def test_a_run_that_takes_too_long_is_ended_with_every_rank_s_stack(apart):
    began = time.monotonic()
    apart.run(functions.leaves_early, 0)
    # by then the ranks have certainly begun, however busy this machine is
    limit = 1 + 2 * (time.monotonic() - began)
    with pytest.raises(HangError) as caught:
        apart.run(functions.is_stuck_here, timeout=limit)
    text = str(caught.value)
    text = text[text.index("\nrank 0:") :]  # before them is said in short where the ranks are
    for rank in range(apart.size):
        assert f"rank {rank}:" in text
    assert text.count("in is_stuck_here") == apart.size
    assert text.count("threading.Event().wait(60)") == apart.size


def test_stacks_can_be_requested_while_it_runs(apart, tmp_path):
    run = apart.launch(functions.waits, (str(tmp_path),))
    wait_for_ranks(run, tmp_path, apart.size)
    stacks = run.stacks()
    run.request_stop("interrupt")
    with pytest.raises(ENDED):
        run.wait()
    assert stacks.count("in waits") == apart.size


@pytest.mark.parametrize("function", [functions.waits, functions.waits_stubbornly])
def test_an_interrupt_ends_it_also_where_ranks_are_deaf_to_it(apart, function, tmp_path):
    run = apart.launch(function, (str(tmp_path),))
    wait_for_ranks(run, tmp_path, apart.size)
    run.request_stop("interrupt")
    with pytest.raises(ENDED):
        run.wait()
    assert apart.run(functions.leaves_early, 0) == [None] * apart.size


def test_a_flood_of_output_arrives_whole(apart):
    run = apart.launch(functions.floods, (30_000,))
    run.wait()
    flood = "".join(f"flood {number}\n" for number in range(30_000))
    for rank in range(apart.size):
        assert run.log_file(rank).read_text().endswith(flood)


def test_arguments_that_cannot_travel_are_named(apart):
    if apart.name == "fork":
        pytest.skip("arguments are inherited by a process that is forked from here: they need not travel")
    with pytest.raises(PayloadError, match=r"args\[0\]"):
        apart.run(functions.leaves_early, threading.Lock())


def test_a_result_that_cannot_come_back_is_none_and_the_part_of_it_is_named(apart):
    run = apart.launch(functions.returns_a_lock)
    if isinstance(apart, SessionExecutor):
        found = {(end.ok, end.value, end.left_out.partition(" (")[0]) for end in run.wait()}
        assert found == {(True, None, "result['lock'] is a lock")}
        return
    with pytest.warns(UserWarning, match=r"result\['lock'\] is a lock .*cannot pickle") as warned:
        assert run.wait(60) == [None] * apart.size
    assert (len(warned), run.view.state, run.results) == (1, "finished", [None] * apart.size)


def test_a_result_that_stays_in_this_process_is_returned_as_it_is(executor):
    if not executor.isolated:
        assert isinstance(executor.run(functions.returns_a_lock)[0]["loss"], float)


GONE = """
import sys
from pathlib import Path
from tests.contracts import functions
from tests.contracts.places import executor_of, process_environment
with process_environment(sys.argv[1]):
    run = executor_of(sys.argv[1], Path(sys.argv[2])).launch(functions.tells_its_process, (sys.argv[2],))
    sys.stdin.read()
"""


@pytest.mark.slow
def test_no_rank_outlives_the_process_that_launched_it(apart, tmp_path):
    def told():
        return list(filter(None, (path.read_text() for path in tmp_path.glob("pid_*"))))

    command = [sys.executable, "-c", GONE, apart.name, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as launcher:
        until(lambda: len(told()) == apart.size)
        ranks = [psutil.Process(int(number)) for number in told()]
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(30)
    _, left = psutil.wait_procs(ranks, timeout=10)
    assert not left
