"""A detached run outlives the process that launched it, and whoever attaches finds all of it."""

import ctypes
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from accelerate_nb import LaunchError, StoppedError, WorkerError, attach, launch, notebook_launcher, runs
from accelerate_nb.events.event_types import HostSample, NodeRanks
from accelerate_nb.events.run_reader import kept_run
from accelerate_nb.events.run_state import RunState
from accelerate_nb.launching.detached.control import (
    ControlClient,
    ControlServer,
    RemoteConductor,
    apply_live,
    connect,
    live_events,
)
from accelerate_nb.launching.detached.saved_outcome import saved_result
from accelerate_nb.transport.memory_file import write_entries
from accelerate_nb.transport.messages import QueryStacks, StacksReply
from tests.launching.detached.trainings import (
    SETTINGS,
    as_another_user,
    host_of,
    launched_elsewhere,
    processes_of,
    running,
    steps_of,
    trains,
    until_gone,
)
from tests.waiting import until


def sleeps():
    import time

    time.sleep(100)


def fails(rank_that_fails, folder):
    """One rank fails when the other returns: one that had not begun by then would be ended with it."""
    others_end = Path(folder) / "ends"
    if os.environ["RANK"] != rank_that_fails:
        others_end.touch()
        return 1
    until(others_end.exists)
    return {}["missing"]


class Point:
    def __init__(self, x):
        self.x = x


def gives_a_point():
    return Point(int(os.environ["RANK"]))


@pytest.fixture
def folder(tmp_path):
    """The parent of runs; nothing of them is left when the test is over."""
    parent = tmp_path / "runs"
    parent.mkdir()
    yield parent
    for kept in runs(parent):
        if not kept.is_over:
            host_of(kept.folder).kill()


def test_a_run_goes_on_when_its_launcher_was_killed_and_an_attached_process_finds_all_of_it(folder):
    launcher, of_run = launched_elsewhere(6, 0.3, folder)
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    until(lambda: steps_of(folder) > [0, 0])
    (kept,) = runs(folder)
    assert (kept.state, kept.is_detached, kept.is_over) == ("running", True, False)
    run = attach(folder=folder, panel=False)
    assert "trains" in run.stacks() or run.done
    assert attach(of_run).wait() == [(0, 6), (1, 6)]
    run.wait()
    assert (run.results, run.error, run.view.state) == ([(0, 6), (1, 6)], None, "finished")
    assert [metric.step for metric in run.view.rank(0).series["loss"]] == list(range(6))
    # it is over, and its results stay
    again = attach(1, folder=folder, panel=False)
    assert again.done
    assert again.results == [(0, 6), (1, 6)]
    assert "finished" in repr(runs(folder))


def test_an_interrupt_ends_the_wait_and_not_the_run(folder):
    run = running(folder)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt, match="goes on"):
        run.wait()
    assert not run.done
    before = steps_of(folder)
    until(lambda: steps_of(folder) > before)
    host, late = host_of(run.folder), RemoteConductor(kept_run(run.folder))
    run.request_stop("kill")
    with pytest.raises(StoppedError):
        run.wait()
    # nobody follows it: it finds the end when it requests something
    until_gone([host])
    late.request_stop("finish")
    assert late.stacks() == ""


def test_an_error_comes_back_with_its_class_and_the_lines_that_raised_it(folder):
    with pytest.raises(KeyError) as caught:
        notebook_launcher(fails, ("1", str(folder)), folder=str(folder), **SETTINGS)
    error = caught.value
    assert isinstance(error, WorkerError)
    assert (error.rank, [failure.rank for failure in error.failures]) == (1, [1])
    assert '{}["missing"]' in str(error)
    assert runs(folder)[0].state == "failed"


def test_a_value_of_a_class_of_the_callers_comes_back(folder):
    found = notebook_launcher(gives_a_point, folder=str(folder), results="all", **SETTINGS)
    assert [(type(point), point.x) for point in found] == [(Point, 0), (Point, 1)]


def test_a_result_that_an_earlier_version_wrote_is_left_out_with_the_reason(tmp_path):
    with (tmp_path / "rank_0.result").open("wb") as file:
        write_entries(file.fileno(), [b"caccelerate_nb.transport.outcome\nReturned\n."])
    found = saved_result(tmp_path, 0, RunState(1))
    assert (found.value, found.failure) == (None, None)
    assert "earlier version" in found.left_out


@pytest.fixture
def adopts_orphans() -> Iterator[None]:
    """This process is the parent of those whose own has gone, so that it gets their exit codes (prctl's PR_SET_CHILD_SUBREAPER)."""
    if sys.platform != "linux":
        pytest.skip("only Linux has a call for it")
    set_subreaper = partial(ctypes.CDLL(None).prctl, 36)
    set_subreaper(1)
    yield
    set_subreaper(0)


@pytest.mark.usefixtures("adopts_orphans")
def test_sigterm_to_the_run_host_stops_all_ranks_after_the_same_step_and_its_code_is_that_of_a_run_that_can_go_on(
    folder,
):
    run = running(folder, results="all")
    until(lambda: run.view.rank(1).state == "running")
    # on the way, a rank is profiled, and a knob of it is changed
    run.profile(steps=2, ranks=[1])
    until(lambda: "scale" in run.view.knobs())
    run.set_knob("scale", 3.0)
    until(lambda: run.view.knobs()["scale"].value == 3.0)
    until(lambda: run.view.rank(1).profile)
    assert (run.folder / "profile_1_rank_1.json.gz").exists()
    host = host_of(run.folder)
    host.terminate()
    (first, second) = run.wait(20)
    assert first[1] == second[1]
    assert run.view.state == "stopped"
    assert os.waitstatus_to_exitcode(os.waitpid(host.pid, 0)[1]) == 75


@pytest.mark.slow
def test_a_run_without_its_lock_is_not_taken_to_be_over_and_ends_by_sigterm(folder):
    run = running(folder)
    host, processes = host_of(run.folder), processes_of(run.folder)
    (run.folder / "host.lock").unlink()
    until(lambda: (run.folder / "host.lock").exists() and not runs(folder)[0].is_over)
    assert not run.done
    host.terminate()
    run.wait(30)
    until_gone(processes)


def test_a_run_in_a_job_of_slurm_is_reached_from_another_machine_by_a_step_of_it(folder, tmp_path, monkeypatch):
    srun = tmp_path / "srun"
    srun.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/step\nwhile [ "${{1#--}}" != "$1" ]; do shift; done\nexec "$@"\n'
    )
    srun.chmod(0o700)
    job = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    run = launch(sleeps, folder=str(folder), **SETTINGS)
    until(lambda: run.view.rank(0).state == run.view.rank(1).state == "running")
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert "time.sleep(100)" in attach(run.folder, panel=False).stacks()
    assert "--jobid=7 --nodelist=n1" in (tmp_path / "step").read_text()
    run.request_stop("kill")
    with pytest.raises(StoppedError):
        run.wait(60)


@pytest.mark.parametrize("setting", [{"start_method": "fork"}, {"engine": "inline"}], ids=str)
def test_what_would_end_with_this_process_is_refused(folder, setting):
    with pytest.raises(LaunchError, match="detach=True was requested"):
        launch(trains, (1, 0, ""), folder=str(folder), **{**SETTINGS, "num_processes": 1, **setting})


def test_the_socket_is_its_users_alone_and_works_at_a_long_path(tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir(mode=0o700)
    with closing(ControlServer(long)) as control, connect(control.path, 5.0) as client:
        assert stat.S_IMODE(control.path.stat().st_mode) == 0o600
        assert client.fileno() >= 0
    assert not control.path.exists()


def test_the_reply_to_an_interrupted_request_is_not_the_next_one_s(tmp_path):
    main, replies = threading.main_thread().ident, iter(["", "new"])
    run = Mock(stacks=lambda: next(replies) or str(signal.pthread_kill(main, signal.SIGINT)))
    control = ControlServer(tmp_path)
    with control.serve(run), closing(ControlClient(control.path)) as client:
        with pytest.raises(KeyboardInterrupt):
            client.request(QueryStacks())
        assert client.request(QueryStacks()) == StacksReply("new")


def test_where_a_folder_holds_no_sockets_another_place_is_taken(tmp_path, monkeypatch):
    bind = socket.socket.bind

    def bind_elsewhere(sock, address):
        if str(address).startswith(str(tmp_path)):
            raise OSError(95, "Operation not supported")
        return bind(sock, address)

    monkeypatch.setattr(socket.socket, "bind", bind_elsewhere)
    with closing(ControlServer(tmp_path)) as control:
        assert control.path.parent != tmp_path
        assert stat.S_IMODE(control.path.parent.stat().st_mode) == 0o700
    assert not control.path.parent.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_can_not_open_the_socket(tmp_path_factory):
    folder = tmp_path_factory.mktemp("open")
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    with closing(ControlServer(folder)) as control:
        done = as_another_user("socket.socket(socket.AF_UNIX).connect(sys.argv[1])", str(control.path))
        assert "PermissionError" in done.stderr


# What a run's folder does not keep comes to whoever attaches to it.


def test_the_load_of_each_machine_comes_to_another_view_of_the_run() -> None:
    views = RunState(2), RunState(2)
    for view in views:
        # these are in the folder
        view.apply(NodeRanks(0, "a", 0, 0))
        view.apply(NodeRanks(1, "b", 1, 1))
    here, there = views
    here.apply(HostSample(1.0, (1, 2), (3, 4), None, 5.0))
    for node in range(2):
        here.apply(HostSample(50.0 + node, (1, 2), None, None, 5.0, node=node))
    apply_live(there, [*live_events(here)])
    assert there.host == here.host
    assert there.node_loads == here.node_loads
    assert len(there.node_loads) == 2
