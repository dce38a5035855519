"""Workers find in their environment what the settings of their launch say, and compute so."""

import os
from pathlib import Path

import pytest

from accelerate_nb import LaunchError, launch, notebook_launcher
from accelerate_nb.config.run_config import resolve
from accelerate_nb.devices import nvml
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.events.run_folder import KEPT_RUNS
from accelerate_nb.launching.launcher import environment, worker_threads
from accelerate_nb.launching.planning.placement import choose

SERVER = AvailableDevices("cuda", "GPU", 4, 64, variable="CUDA_VISIBLE_DEVICES")


def test_workers_have_the_accelerators_and_the_threads_that_were_requested_whatever_variables_are_set(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = resolve({"gpu_ids": "1,3", "enable_cpu_affinity": True, "num_cpu_threads_per_process": 3}, {})
    choice = choose(config.launching, SERVER, can_fork=True)
    threads = worker_threads(config.launching, choice)
    variables = environment(config, choice, threads)
    assert (choice.size, threads) == (2, 3)
    assert variables["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert variables["ACCELERATE_CPU_AFFINITY"] == "true"


@pytest.mark.parametrize(
    ("name", "version", "is_off"),
    [
        ("NVIDIA GeForce RTX 4090", "535.54.03", True),
        ("NVIDIA GeForce RTX 4090", "550.40.07", False),
        ("NVIDIA GeForce RTX 4090", "", False),
        ("NVIDIA H100", "535.54.03", False),
    ],
)
def test_gpus_that_can_t_reach_each_other_send_through_the_host(monkeypatch, name, version, is_off):
    # no such GPU is at hand
    monkeypatch.setattr(nvml, "driver", lambda: nvml.Driver(version, "12.2", ((name, 1),) * 4))
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    for size in (1, 4):
        config = resolve({"num_processes": size}, {})
        variables = environment(config, choose(config.launching, SERVER, can_fork=True), 1)
        assert variables.get("NCCL_P2P_DISABLE") == ("1" if is_off and size > 1 else None)
        assert "NCCL_IB_DISABLE" not in variables


@pytest.mark.parametrize("of_user", [True, False])
def test_old_runs_are_removed_from_the_cache_and_from_no_folder_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_user: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ACCELERATE_NB_FOLDER", raising=False)
    folder = tmp_path / ("sweep" if of_user else "accelerate_nb_runs")
    made = [folder / f"2020-01-01_{number:06}_train" for number in range(KEPT_RUNS)]
    for old in made:
        old.mkdir(parents=True)
        (old / "status.json").touch()
    settings = {"folder": str(folder)} if of_user else {}
    assert notebook_launcher(int, ("7",), engine="inline", **settings) == 7
    assert [old.exists() for old in made] == [of_user, *[True] * (KEPT_RUNS - 1)]


def test_a_launch_that_is_refused_for_its_folder_keeps_no_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = os.listdir("/dev/fd")
    with pytest.raises(LaunchError, match="file"):
        launch(int, ("7",), num_processes=1, cpu=True, folder=str(tmp_path / "file" / "runs"))
    assert os.listdir("/dev/fd") == before
