"""The supervisor forks on request, and nothing that it can't understand ends it without a reason."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb import LaunchError, launch, notebook_launcher
from accelerate_nb.launching.engines import supervisor as engine
from accelerate_nb.launching.engines.supervisor import SupervisorHandle
from accelerate_nb.launching.worker_group import Stop
from accelerate_nb.supervisor.main import FOREIGN
from accelerate_nb.transport import channel
from accelerate_nb.transport.channel import frame
from accelerate_nb.transport.messages import LeaveGroup, RankOutcome

ONE = {"num_processes": 1, "cpu": True, "config_file": ""}


@pytest.fixture
def handle() -> Iterator[SupervisorHandle]:
    engine.cool()
    yield engine.warm()
    engine.cool()


def control(handle: SupervisorHandle) -> socket.socket:
    """The socket to a supervisor, for whatever bytes."""
    return socket.socket(fileno=os.dup(handle._control.fileno()))


def test_messages_that_are_not_for_it_do_not_end_it(handle: SupervisorHandle) -> None:
    with control(handle) as raw:
        raw.sendall(frame(LeaveGroup()))
        socket.send_fds(raw, [frame(RankOutcome(0, 0), 1)], [raw.fileno()])
    assert notebook_launcher(os.getppid, **ONE) == handle.pid


def test_bytes_that_are_no_message_end_it_with_the_reason_and_the_next_launch_has_another(
    handle: SupervisorHandle,
) -> None:
    with control(handle) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert handle.ended(60) == FOREIGN
    assert "bytes that are no message have come" in handle.log()
    assert notebook_launcher(os.getppid, **ONE) == engine.warm().pid != handle.pid


def test_a_kernel_of_another_version_must_restart(handle: SupervisorHandle, monkeypatch) -> None:
    known = channel.VERSION
    monkeypatch.setattr(channel, "VERSION", known + 1)
    told = rf"version {known + 1} of the protocol, and {known} is understood here.*Restart its kernel"
    with pytest.raises(LaunchError, match=told):
        notebook_launcher(os.getppid, **ONE)


def test_a_launch_ends_that_has_more_messages_than_its_sockets_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = socket.socketpair

    def small_pair() -> tuple[socket.socket, socket.socket]:
        ends = pair()
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return ends

    engine.cool()
    monkeypatch.setattr(socket, "socketpair", small_pair)
    try:
        parents = notebook_launcher(os.getppid, num_processes=16, cpu=True, config_file="", results="all")
        assert parents == [engine.warm().pid] * 16
    finally:
        engine.cool()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_workers_that_are_not_forked_yet_end_with_the_others(how: Stop) -> None:
    settings = {"num_processes": 24, "cpu": True, "config_file": "", "panel": False, "stop_grace_period": 2.0}
    run = launch(time.sleep, (600,), **settings)
    while "running" not in {run.view.rank(rank).state for rank in run.view.ranks}:
        run.wait_until_over(0.005)
    run.request_stop(how)
    assert run.wait_until_over(60)
    assert run.view.state == "stopped"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always looks into the current folder first")
@pytest.mark.parametrize("settings", [{}, {"start_method": "spawn"}, {"detach": True}], ids=str)
def test_the_current_folder_s_files_are_not_python_s_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    for name in ("token", "random"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    engine.cool()
    assert launch(int, ("7",), **ONE, **settings, folder=tmp_path / "runs").wait(60) == 7


def test_entries_that_are_no_text_and_a_folder_that_is_gone_are_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    monkeypatch.setattr(sys, "argv", ["x", 3])
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    engine.cool()
    assert notebook_launcher(int, ("7",), **ONE) == 7
