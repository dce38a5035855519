"""What would go wrong at a launch is told before it, in the words of the launch itself."""

import os
import re
import socket

import pytest
import torch

from accelerate_nb.config.run_config import resolve
from accelerate_nb.devices.nvml import Driver
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.launching.planning import preflight
from accelerate_nb.launching.planning.placement import choose
from tests.launching.planning.test_placement import KAGGLE as TPU, LAPTOP, through

TWO_GPUS = AvailableDevices("cuda", "GPU", 2, 16)


def ready(settings, devices=LAPTOP, can_fork=True):
    return preflight.run_preflight(settings, devices, can_fork)


def test_what_fits_is_ready_to_be_launched():
    outlook = ready({"num_processes": 2, "mixed_precision": "bf16"}, TWO_GPUS)
    assert outlook.possible
    assert outlook.objections == ()
    assert outlook.config == resolve({"num_processes": 2, "mixed_precision": "bf16"}, {})
    assert outlook.choice == choose(outlook.config.launching, TWO_GPUS, can_fork=True)


@pytest.mark.parametrize(
    ("settings", "name", "text"),
    [
        ({"num_processes": 3}, "num_processes", "this machine has 2 GPUs"),
        ({"num_processes": 0}, "num_processes", "at least 1"),
        ({"rdzv_backend": "etcd"}, "rdzv_backend", "not offered here yet"),
        ({"num_nodes": 2, "node_rank": 2}, "node_rank", "for num_nodes=2. Ranks of nodes begin with 0"),
        ({"engine": "inline", "num_processes": 2}, "engine", "this process is only one"),
        ({"timeout": "soon"}, "timeout", "should be a number"),
    ],
)
def test_each_objection_stands_at_the_setting_to_change_in_the_words_of_the_launch(settings, name, text):
    outlook = ready(settings, TWO_GPUS if name != "engine" else LAPTOP)
    assert not outlook.possible
    (objection,) = outlook.objections
    assert objection.name == name
    assert text in objection.text
    with pytest.raises(AccelerateNbError) as raised:
        choose(resolve(settings, {}).launching, TWO_GPUS if name != "engine" else LAPTOP, can_fork=True)
    assert str(raised.value) == objection.text


def test_several_wrong_settings_are_each_reported():
    wrong = {"num_processes": 0, "timeout": -1}
    assert [objection.name for objection in ready(wrong).objections] == list(wrong)


NO_FORK = AvailableDevices("cpu", "CPU", 0, 8)
FSDP = {"fsdp_config": {"fsdp_offload_params": True}}


@pytest.mark.parametrize(
    ("settings", "devices", "name", "better", "on_others"),
    [
        ({"num_processes": 3}, LAPTOP, "num_processes", {}, AvailableDevices("cuda", "GPU", 8, 16)),
        ({"mixed_precision": "fp16"}, LAPTOP, "mixed_precision", {}, TWO_GPUS),
        ({"mixed_precision": "fp16"}, TPU, "mixed_precision", {"mixed_precision": "bf16"}, TPU),
        # of a strategy that was not requested
        (FSDP, TWO_GPUS, "fsdp_config", {"strategy": "fsdp"}, TWO_GPUS),
    ],
)
def test_what_works_and_is_slow_is_advice(settings, devices, name, better, on_others):
    outlook = ready(settings, devices)
    assert outlook.possible
    assert [(objection.name, objection.grave) for objection in outlook.objections] == [(name, False)]
    assert all(value in outlook.objections[0].text for value in better.values())
    assert not ready({**settings, **better}, on_others).objections


@pytest.mark.parametrize(
    ("settings", "devices", "name", "words"),
    [
        ({"num_nodes": 2, "num_processes": 3}, TWO_GPUS, "num_processes", "can't share them evenly"),
        ({"num_processes": 3}, TPU, "num_processes", "Use 8 or 1"),
        ({"gpu_ids": "0"}, TPU, "gpu_ids", "not chosen by number"),
        (
            {"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}},
            TWO_GPUS,
            "parallelism_config",
            r"\{dp_replicate_size: 2, dp_shard_size: 2\} was requested, which takes 4 processes, but .* a run of 2\.",
        ),
        ({"start_method": "fork"}, NO_FORK, "start_method", "this system can't fork"),
        ({"strategy": "fsdp"}, TPU, "strategy", "strategy='fsdp' was requested on XLA devices.*Leave strategy out"),
    ],
)
def test_what_does_not_fit_the_machine_stands_at_its_setting(settings, devices, name, words):
    (objection,) = ready(settings, devices, can_fork=devices is not NO_FORK).objections
    assert (objection.name, objection.grave) == (name, True)
    assert re.search(words, objection.text)


def test_what_fits_only_together_is_ready():
    for degrees in ({"dp_shard_size": 2}, {"dp_replicate_size": 2}, {"dp_shard_size": 1}):
        assert not ready({"parallelism_config": degrees}, TWO_GPUS).objections
    assert ready({"num_nodes": 2, "node_rank": 1}, TWO_GPUS).possible


# What would get in a training's way is seen before there is a worker, with what to do about it.


MIB = 1 << 20
NVIDIA = Driver("570.1", "12.8", (("H100", 80 << 30),) * 2)


def test_this_machine_is_looked_at(tmp_path):
    reported = []
    config = resolve({"cpu": True, "num_processes": 2, "folder": str(tmp_path / "runs")}, {})
    found = preflight.run_checks(config, os.environ, reported.append)
    assert reported == found
    assert ", ".join(item.name for item in found) == "environment, settings, torch, shared memory, open files, folder"
    assert {item.state for item in found} == {"passed"}, found
    assert all(item.text for item in found)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("environment", "state", "advice"),
    [
        ({}, "passed", ""),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "failed", "unset RANK WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "passed", "unset RANK WORLD_SIZE"),
        ({"MASTER_PORT": "29500"}, "passed", "unset MASTER_PORT"),
    ],
)
def test_variables_that_a_launch_left_are_seen(environment, state, advice):
    check = preflight.of_environment(environment)
    assert (check.state, check.advice) == (state, advice)
    assert all(f"{name}={value}" in check.text for name, value in environment.items())


@pytest.mark.parametrize(
    ("settings", "devices", "state", "text"),
    [
        ({}, TWO_GPUS, "passed", "2 of 2 GPUs"),
        ({"num_processes": 3}, TWO_GPUS, "failed", "num_processes=3 was requested, but this machine has 2 GPUs"),
        ({"num_processes": 3}, LAPTOP, "passed", "3 processes would share 2 CPU cores"),
        ({"cpu": True, "mixed_precision": "fp16"}, LAPTOP, "passed", "bf16"),
    ],
)
def test_settings_that_do_not_fit_the_machine_are_seen(settings, devices, state, text):
    check = preflight.of_settings(resolve(settings, {}), devices)
    assert check.state == state
    assert text in check.text + check.advice


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built for CUDA")
def test_a_torch_that_cannot_use_the_gpus_is_seen():
    check = preflight.of_torch(LAPTOP, NVIDIA, {})
    assert check.state == "failed"
    assert "2 NVIDIA GPUs, and torch was built without CUDA" in check.text
    assert "pytorch.org" in check.advice


def test_gpus_that_are_hidden_are_noted(monkeypatch):
    monkeypatch.setattr(preflight, "torch_is_built_for", lambda name: name == "cuda")
    check = preflight.of_torch(LAPTOP, NVIDIA, {"CUDA_VISIBLE_DEVICES": ""})
    assert check.state == "passed"
    assert "CUDA_VISIBLE_DEVICES='' hides them" in check.text
    assert preflight.of_torch(TWO_GPUS, NVIDIA, {}).advice == ""


def test_a_tpu_is_ready_if_nobody_holds_its_chips():
    check = preflight.of_runtime(through("TPU", 4), [])
    assert (check.state, check.text) == ("passed", "it computes on 4 TPU chips")
    check = preflight.of_runtime(through("TPU", 4), [11, 12])
    assert (check.state, check.text) == ("failed", "the TPU's chips are held by process 11, 12")
    assert "Restart the notebook's kernel" in check.advice
    assert preflight.of_runtime(through("CPU", 1), []).text == "it computes on 1 XLA CPU device"
    check = preflight.of_runtime(through("TPU", 0, trouble="PJRT_DEVICE=TPU asks for a TPU, but there is none."), [])
    assert (check.state, check.text) == ("failed", "PJRT_DEVICE=TPU asks for a TPU, but there is none.")


@pytest.mark.parametrize(
    ("free", "state", "advises"),
    [(None, "passed", False), (0, "failed", True), (64 * MIB, "passed", True), (8 << 30, "passed", False)],
)
def test_little_shared_memory_is_seen(free, state, advises):
    check = preflight.of_shared_memory(free)
    assert check.state == state
    assert ("--shm-size" in check.advice) == advises


@pytest.mark.parametrize(("limit", "advises"), [(None, False), (256, True), (20_000, False)])
def test_a_low_limit_of_open_files_is_noted(limit, advises):
    check = preflight.of_open_files(limit)
    assert check.state == "passed"
    assert ("ulimit -n" in check.advice) == advises


def test_a_folder_that_cannot_be_written_to_and_a_full_disk_are_seen(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    check = preflight.of_folder(tmp_path / "file" / "runs")
    assert check.state == "failed"
    assert "--folder" in check.advice
    usage = preflight.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=0))
    check = preflight.of_folder(tmp_path)
    assert (check.state, check.advice.split(",")[0]) == ("failed", "Make space")


def test_a_port_that_is_taken_is_seen_with_who_has_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = preflight.of_port(port)
        assert check.state == "failed"
        assert f"{port} can't be used" in check.text
        assert f"process {os.getpid()}" in check.text
    assert preflight.of_port(port).state == "passed"
