"""What would go wrong at a launch is told before it, in the words of the launch itself."""

from __future__ import annotations

import re

import pytest

from accelerate_nb.config.run_config import resolve
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.devices.xla import XlaDevices
from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.launching.planning.placement import choose
from accelerate_nb.launching.planning.preflight import run_preflight

TWO_GPUS = AvailableDevices("cuda", "GPU", 2, 16)
LAPTOP = AvailableDevices("cpu", "CPU", 0, 2)


def preflight(settings, devices=LAPTOP, can_fork=True):
    return run_preflight(settings, devices, can_fork)


def test_what_fits_is_ready_to_be_launched():
    outlook = preflight({"num_processes": 2, "mixed_precision": "bf16"}, TWO_GPUS)
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
    outlook = preflight(settings, TWO_GPUS if name != "engine" else LAPTOP)
    assert not outlook.possible
    (objection,) = outlook.objections
    assert objection.name == name
    assert text in objection.text
    with pytest.raises(AccelerateNbError) as raised:
        choose(resolve(settings, {}).launching, TWO_GPUS if name != "engine" else LAPTOP, can_fork=True)
    assert str(raised.value) == objection.text


def test_settings_that_fit_only_together_are_ready():
    assert preflight({"num_nodes": 2, "node_rank": 1}, TWO_GPUS).possible


def test_processes_that_machines_can_not_share_are_reported():
    (objection,) = preflight({"num_nodes": 2, "num_processes": 3}, TWO_GPUS).objections
    assert objection.name == "num_processes"
    assert "can't share them evenly" in objection.text


def test_several_wrong_settings_are_each_reported():
    assert [objection.name for objection in preflight({"num_processes": 0, "timeout": -1}).objections] == [
        "num_processes",
        "timeout",
    ]


def test_a_system_that_cannot_fork_is_an_error():
    (objection,) = preflight({"start_method": "fork"}, can_fork=False).objections
    assert objection.name == "start_method"


@pytest.mark.parametrize(
    ("settings", "name"), [({"num_processes": 3}, "num_processes"), ({"mixed_precision": "fp16"}, "mixed_precision")]
)
def test_what_works_and_is_slow_is_advice(settings, name):
    outlook = preflight(settings)
    assert outlook.possible
    assert [(objection.name, objection.grave) for objection in outlook.objections] == [(name, False)]
    assert not preflight(settings, AvailableDevices("cuda", "GPU", 8, 16)).objections


TPU = AvailableDevices("xla", "TPU chip", 8, 96, xla=XlaDevices("TPU", 8))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"num_processes": 3}, "num_processes"),
        ({"gpu_ids": "0"}, "gpu_ids"),
    ],
)
def test_what_a_tpu_can_not_do_stands_at_its_setting(settings, name):
    (objection,) = preflight(settings, TPU).objections
    assert (objection.name, objection.grave) == (name, True)


def test_bf16_is_advised_on_a_tpu():
    (objection,) = preflight({"mixed_precision": "fp16"}, TPU).objections
    assert (objection.name, objection.grave) == ("mixed_precision", False)
    assert "bf16" in objection.text
    assert not preflight({"mixed_precision": "bf16"}, TPU).objections


def test_options_of_a_strategy_that_was_not_requested_are_reported():
    options = {"fsdp_config": {"fsdp_offload_params": True}}
    (objection,) = preflight(options, TWO_GPUS).objections
    assert (objection.name, objection.grave) == ("fsdp_config", False)
    assert not preflight({**options, "strategy": "fsdp"}, TWO_GPUS).objections


@pytest.mark.parametrize(
    ("settings", "devices", "name", "words"),
    [
        (
            {"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}},
            TWO_GPUS,
            "parallelism_config",
            r"\{dp_replicate_size: 2, dp_shard_size: 2\} was requested, which takes 4 processes, but .* a run of 2\.",
        ),
        ({"strategy": "fsdp"}, TPU, "strategy", "strategy='fsdp' was requested on XLA devices.*Leave strategy out"),
    ],
)
def test_what_a_strategy_can_not_do_stands_at_its_setting(settings, devices, name, words):
    (objection,) = preflight(settings, devices).objections
    assert (objection.name, objection.grave) == (name, True)
    assert re.search(words, objection.text)


def test_degrees_that_make_the_number_of_processes_are_fine():
    for degrees in ({"dp_shard_size": 2}, {"dp_replicate_size": 2}, {"dp_shard_size": 1}):
        assert not preflight({"parallelism_config": degrees}, TWO_GPUS).objections
