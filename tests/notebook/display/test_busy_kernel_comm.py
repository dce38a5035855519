"""Where there is no kernel that it knows, the lane does nothing, and says so."""

from types import SimpleNamespace

import pytest

from accelerate_nb.notebook.display import busy_kernel_comm as lanes
from accelerate_nb.notebook.display.busy_kernel_comm import BusyKernelComm


@pytest.mark.parametrize("kernel", [None, object(), SimpleNamespace(shell_stream=None), SimpleNamespace(session=None)])
def test_an_unknown_kernel_is_left_alone(monkeypatch, kernel):
    monkeypatch.setattr(lanes, "ipython_shell", lambda: SimpleNamespace(kernel=kernel))
    lane = BusyKernelComm()
    assert lane.join("comm", print) is False
    with lane.held():
        lane.pump()
    lane.leave("comm")


def test_a_message_that_can_not_be_read_goes_the_kernels_own_way(monkeypatch):
    stream = SimpleNamespace(_recv_callback=lambda frames: f"kernel took {frames}")
    stream.on_recv = lambda callback, copy: setattr(stream, "_recv_callback", callback)
    kernel = SimpleNamespace(shell_stream=stream, session=None)
    monkeypatch.setattr(lanes, "ipython_shell", lambda: SimpleNamespace(kernel=kernel))
    lane = BusyKernelComm()
    former = stream._recv_callback
    assert lane.join("comm", print) is True
    assert stream._recv_callback("frames") == "kernel took frames"
    lane.leave("comm")
    assert stream._recv_callback is former
