"""Devices are counted without waking a driver."""

import os
from pathlib import Path

import pytest
import torch

from accelerate_nb.devices import cpu, gpus
from accelerate_nb.devices.probe import probe
from tests.processes import python


def test_the_probe_agrees_with_torch():
    found = probe()
    assert found.count == torch.accelerator.device_count()
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # a CUDA build names cuda without a GPU
    assert found.kind == ("cpu" if accelerator is None else accelerator.type)


@pytest.mark.gpu
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch was not built for CUDA")
def test_a_process_may_fork_after_the_probe_and_not_once_cuda_is_awake():
    code = """
import ctypes, os, torch
from accelerate_nb.devices.probe import probe
from accelerate_nb.supervisor.main import is_fit

def child_computes():
    if (pid := os.fork()) == 0:
        try:
            torch.ones(1, device="cuda").item()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0

probe()
ctypes.CDLL("libcuda.so.1")
print(is_fit(), child_computes())
torch.cuda.is_available()
print(is_fit(), child_computes())
"""
    done = python("-c", code, check=True, OMP_NUM_THREADS="1", PYTORCH_NVML_BASED_CUDA_CHECK="0")
    assert done.stdout.split() == ["True", "True", "False", "False"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch was not built for CUDA")
@pytest.mark.parametrize("visible", ["", "0", "-1", "0,0", "99", "0,99"])
def test_visible_gpus_are_those_that_torch_sees(visible):
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    done = python("-c", "import torch; print(torch.cuda.device_count())", check=True, **environment)
    assert gpus.nvidia_gpus({**os.environ, **environment}) == int(done.stdout)


# How many of four GPUs a process sees by each text.
VISIBLE = {
    0: ["", "-1", "1,1", "none"],
    1: ["0", "1,-1,2", "0,9,1", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-a,MIG-b"],
    2: ["3,1", " 0 , 2 ", "GPU-a,GPU-b"],
    4: [None],
}


@pytest.mark.parametrize(("count", "text"), [(count, text) for count in VISIBLE for text in VISIBLE[count]])
def test_a_process_sees_the_gpus_that_cuda_would_show_it(count, text):
    assert gpus.visible(text, 4) == count
    assert gpus.visible(text, 0) == 0


def test_a_container_has_the_gpus_whose_device_files_it_has(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr(gpus, "opened_library", lambda: None)
    assert gpus.nvidia_gpus({}) == 2


def test_amds_cpus_are_no_gpus(tmp_path, monkeypatch):
    for number, units in enumerate([0, 304, 304]):
        node = tmp_path / str(number)
        node.mkdir()
        (node / "properties").write_text(f"cpu_cores_count 8\nsimd_count {units}\nmem_banks_count 1\n")
    monkeypatch.setattr(gpus, "_AMD_NODES", tmp_path)
    assert gpus.amd_gpus({}) == 2
    assert gpus.amd_gpus({"HIP_VISIBLE_DEVICES": "1"}) == 1


def test_only_intels_render_nodes_are_xpus(tmp_path, monkeypatch):
    for name, vendor in [("renderD128", "0x8086"), ("renderD129", "0x10de"), ("card0", "0x8086")]:
        device = tmp_path / name / "device"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(gpus, "_INTEL_NODES", tmp_path)
    assert gpus.intel_gpus({}) == 1


def test_gpu_checks_are_left_out_where_no_gpu_is_visible():
    done = python(Path(__file__).parents[2] / ".ci" / "find_gpu.py", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, "no NVIDIA GPU that CUDA_VISIBLE_DEVICES='' shows" in done.stdout) == (69, True)


def test_a_mac_has_one_gpu_or_none():
    assert gpus.apple_gpus({}) == int(torch.backends.mps.is_available())


@pytest.mark.parametrize("name", ["cuda", "hip", "xpu"])
def test_what_torch_was_built_for_is_read_right(name):
    assert gpus.torch_is_built_for(name) == (getattr(torch.version, name, None) is not None)


def test_no_more_cores_are_counted_than_the_process_may_use():
    assert 1 <= cpu.cores() <= len(os.sched_getaffinity(0))
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from accelerate_nb.devices.cpu import cores; print(cores())"
    assert python("-c", code, check=True).stdout == "1\n"


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000\n", "pod/box/cpu.max": "max 100000\n"}, 2.0),
        (
            "3:cpu,cpuacct:/box\n2:memory:/\n",
            {"cpu/box/cpu.cfs_quota_us": "300000\n", "cpu/box/cpu.cfs_period_us": "100000\n"},
            3.0,
        ),
        (
            "0::/\n",
            {"cpu.max": "max 100000\n", "cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("", {}, None),
    ],
)
def test_the_quota_of_a_control_group_or_of_one_above_it_counts(tmp_path, membership, files, cores):
    for name, text in {"membership": membership, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu.cgroup_quota(tmp_path, tmp_path / "membership") == cores
