"""NVIDIA's driver is asked for its version and its GPUs' names through the management library."""

import ctypes

import pytest

from accelerate_nb.devices import gpus
from accelerate_nb.devices.nvml import Driver, GpuGauge, driver


class Library:
    """The management library of a machine with two GPUs, of which the second was not given to this container."""

    fails = False
    opened = 0

    def nvmlInit_v2(self):
        self.opened += 1
        return 9 * self.fails

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


@pytest.fixture
def nvml(monkeypatch):
    library = Library()
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda _: library)
    gpus.opened_library.cache_clear()
    yield library
    gpus.opened_library.cache_clear()


def test_the_driver_and_the_gpus_are_named_by_a_library_that_is_opened_once(nvml):
    assert driver() == Driver("570.1", "12.8", (("NVIDIA H100", 80 << 30),))
    assert GpuGauge({}).sample(1, 0.0) is None
    assert gpus.nvidia_gpus({}) == 2
    assert nvml.opened == 1


def test_a_driver_that_does_not_answer_is_none(nvml):
    nvml.fails = True
    assert driver() is None
    assert GpuGauge({}).sample(0, 0.0) is None
    assert nvml.opened == 1


@pytest.mark.gpu
@pytest.mark.skipif(gpus.opened_library() is None, reason="no driver of NVIDIA's")
def test_the_gpus_of_this_machine_have_names():
    found = driver()
    assert found is not None
    assert found.version
    assert all(name and memory for name, memory in found.gpus)
