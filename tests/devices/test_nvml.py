"""NVIDIA's driver is asked for its version and its GPUs' names through the management library."""

from __future__ import annotations

import ctypes

import pytest

from accelerate_nb.devices.cuda import library
from accelerate_nb.devices.nvml import Driver, Gpu, driver


class Library:
    """The management library of a machine with two GPUs, of which the second was not given to this container."""

    users = 0

    def nvmlInit_v2(self):
        self.users += 1
        return 0

    def nvmlShutdown(self):
        self.users -= 1
        return 0

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"570.1"
        return 0

    def nvmlSystemGetCudaDriverVersion(self, into):
        into._obj.value = 12080
        return 0

    def nvmlDeviceGetCount_v2(self, into):
        into._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 7
        return 0 if index.value == 0 else 4

    def nvmlDeviceGetMemoryInfo(self, handle, into):
        into._obj.total = 80 << 30
        return 0

    def nvmlDeviceGetName(self, handle, text, size):
        assert isinstance(size, ctypes.c_uint)
        text.value = b"NVIDIA H100"
        return 0


def test_the_driver_and_the_gpus_are_named():
    nvml = Library()
    assert driver(nvml) == Driver("570.1", "12.8", (Gpu("NVIDIA H100", 80 << 30),))
    assert nvml.users == 0


def test_a_driver_that_does_not_answer_is_none(monkeypatch):
    nvml = Library()
    monkeypatch.setattr(nvml, "nvmlInit_v2", lambda: 9, raising=False)
    assert driver(nvml) is None


@pytest.mark.gpu
@pytest.mark.skipif(library() is None, reason="no driver of NVIDIA's")
def test_the_gpus_of_this_machine_have_names():
    found = driver()
    assert found is not None
    assert found.version
    assert all(gpu.name and gpu.memory for gpu in found.gpus)
