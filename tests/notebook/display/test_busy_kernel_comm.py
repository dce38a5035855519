"""A `BusyKernelComm` leaves an unknown kernel alone, and says so."""

from types import SimpleNamespace

import pytest

from accelerate_nb.notebook.display import busy_kernel_comm as module
from accelerate_nb.notebook.display.busy_kernel_comm import BusyKernelComm


@pytest.mark.parametrize("kernel", [None, object(), SimpleNamespace(shell_stream=None), SimpleNamespace(session=None)])
def test_an_unknown_kernel_is_left_alone(monkeypatch, kernel):
    monkeypatch.setattr(module, "ipython_shell", lambda: SimpleNamespace(kernel=kernel))
    comm = BusyKernelComm()
    assert comm.join("comm", print) is False
    with comm.held():
        comm.pump()
    comm.leave("comm")


def test_a_message_that_can_not_be_read_goes_the_kernels_own_way(monkeypatch):
    stream = SimpleNamespace(_recv_callback=lambda frames: f"kernel took {frames}")
    stream.on_recv = lambda callback, copy: setattr(stream, "_recv_callback", callback)
    kernel = SimpleNamespace(shell_stream=stream, session=None)
    monkeypatch.setattr(module, "ipython_shell", lambda: SimpleNamespace(kernel=kernel))
    comm = BusyKernelComm()
    former = stream._recv_callback
    assert comm.join("comm", print) is True
    assert stream._recv_callback("frames") == "kernel took frames"
    comm.leave("comm")
    assert stream._recv_callback is former
