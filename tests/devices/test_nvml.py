"""NVIDIA's driver is asked for its version, its GPUs' names and how busy they are through the management library."""

import ctypes

import pytest

from accelerate_nb.devices import gpus
from accelerate_nb.devices.nvml import Driver, GpuGauge, driver

GIB = 1 << 30


class Library:
    """The management library of a machine with two GPUs and a slice of one; some may not be given to this container."""

    UUIDS = ("GPU-11112222-aaaa", "GPU-33334444-bbbb", "MIG-55556666-cccc")
    fails = False
    missing = ()
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
        handle._obj.value = index.value + 1
        return 4 if index.value in self.missing else 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        if uuid.value.decode() not in self.UUIDS:
            return 6
        handle._obj.value = self.UUIDS.index(uuid.value.decode()) + 1
        return 0

    def nvmlDeviceGetUUID(self, handle, text, length):
        text.value = self.UUIDS[handle.value - 1].encode()
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle, into):
        if handle.value == 3:
            return 3
        into._obj.gpu = 10 * handle.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, into):
        into._obj.total, into._obj.used = 80 * GIB, handle.value * GIB
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
    nvml.missing = (1,)
    assert driver() == Driver("570.1", "12.8", (("NVIDIA H100", 80 * GIB),))
    assert GpuGauge({}).sample(1, 0.0) is None
    assert gpus.nvidia_gpus({}) == 2
    assert nvml.opened == 1


def test_a_driver_that_does_not_answer_is_none(nvml):
    nvml.fails = True
    assert driver() is None
    assert GpuGauge({}).sample(0, 0.0) is None
    assert nvml.opened == 1


@pytest.mark.parametrize(
    ("visible", "busy"),
    [
        (None, [10.0, 20.0]),
        ("1,0", [20.0, 10.0]),
        ("GPU-3333", [20.0]),
        ("GPU-33334444-bbbb,GPU-1", [20.0, 10.0]),
        ("MIG-55556666-cccc", [None]),
        ("MIG-unknown", []),
        ("", []),
        ("-1", []),
        ("1,7,0", [20.0]),
    ],
)
def test_a_rank_s_gpu_is_the_one_that_it_sees(visible, busy):
    gauge = GpuGauge({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, Library())
    found = [sample for rank in range(2) if (sample := gauge.sample(rank, 3.0)) is not None]
    assert [item.utilisation for item in found] == busy
    assert [item.device for item in found] == [f"cuda:{rank}" for rank in range(len(busy))]
    assert all(item.memory_total == 80 * GIB and item.memory_used % GIB == 0 for item in found)
    gauge.close()
    assert gauge.sample(0, 3.0) is None


@pytest.mark.gpu
@pytest.mark.skipif(gpus.opened_library() is None, reason="no driver of NVIDIA's")
def test_the_gpus_of_this_machine_have_names_and_report_how_busy_they_are():
    found = driver()
    assert found.version
    assert all(name and memory for name, memory in found.gpus)
    gauge = GpuGauge({})
    sample = gauge.sample(0, 1.0)
    gauge.close()
    assert 0 <= sample.utilisation <= 100
    assert sample.memory_total > GIB
    assert 0 < sample.memory_used < sample.memory_total
