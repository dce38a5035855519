"""A worker answers while its function runs, and no question harms it."""

import ctypes
import os
import resource
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil

from accelerate_nb import Accelerator, launch
from tests.waiting import until

SETTINGS = {"num_processes": 1, "cpu": True, "config_file": "", "timeout": 60, "panel": "off"}


def waits_for(path):
    while not Path(path).exists():
        threading.Event().wait(0.01)
    return "well"


def until_it_runs(run):
    until(lambda: run.view.rank(0).state == "running", run)
    return int(run.view.rank(0).detail)


def computes_in_threads(path):
    def deep(depth):
        return depth if depth == 0 else deep(depth - 1)

    def always():
        while True:
            deep(30)
            sorted(range(20), key=lambda item: -item)

    for _ in range(4):
        threading.Thread(target=always, daemon=True).start()
    return waits_for(path)


def test_stacks_of_a_rank_are_requested_as_often_as_one_likes_while_its_threads_run(tmp_path):
    end = tmp_path / "end"
    run = launch(computes_in_threads, (str(end),), **SETTINGS)
    until(lambda: "in computes_in_threads" in run.stacks(), run)
    for _ in range(100):
        assert "in computes_in_threads" in run.stacks()
    end.touch()
    assert run.wait(60) == "well"


def test_a_rank_in_compiled_code_that_lets_no_other_thread_run_shows_its_stack():
    run = launch(lambda: ctypes.PyDLL(None).sleep(60), **SETTINGS)
    until_it_runs(run)
    until(lambda: "in <lambda>" in run.stacks(), run)
    run.stop(timeout=0)


def notes_signals(path):
    signal.signal(signal.SIGUSR1, lambda *_: Path(f"{path}.signalled").touch())
    return waits_for(path)


def test_a_rank_that_is_stopped_is_sent_no_signal_that_it_would_meet_where_it_goes_on(tmp_path):
    end = tmp_path / "end"
    run = launch(notes_signals, (str(end),), **SETTINGS)
    process = psutil.Process(until_it_runs(run))
    process.suspend()
    until(lambda: process.status() == psutil.STATUS_STOPPED)
    assert f"its process {process.pid} is stopped" in run.stacks()
    process.resume()
    end.touch()
    assert run.wait(60) == "well"
    assert not Path(f"{end}.signalled").exists()


@contextmanager
def no_more_files():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def waits_without_files(folder):
    accelerator = Accelerator()
    # from its first check on a rank stops by itself
    assert not accelerator.stop_requested
    # the others may still have to connect
    accelerator.wait_for_everyone()
    Path(folder, str(accelerator.process_index)).touch()
    with no_more_files():
        while not accelerator.stop_requested:
            threading.Event().wait(0.01)
    return "well"


def test_stacks_are_shown_where_nobody_can_open_more_files_and_ranks_can_still_be_stopped(tmp_path):
    run = launch(waits_without_files, (str(tmp_path),), **{**SETTINGS, "num_processes": 2})
    until(lambda: len(list(tmp_path.iterdir())) == 2, run)
    assert run.stacks().count("in waits_without_files") == 2
    before = len(os.listdir("/dev/fd"))
    with no_more_files():
        assert run.stacks().count("in waits_without_files") == 2
    assert len(os.listdir("/dev/fd")) <= before
    run.stop()
    assert run.wait(60) == "well"
