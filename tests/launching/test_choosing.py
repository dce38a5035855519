"""The choice of what places the workers follows from the wish for this machine; what does not fit is said."""

from __future__ import annotations

import pytest

from accelerate_nb.config.launching import Launching
from accelerate_nb.devices.base import Devices
from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.choosing import choose

LAPTOP = Devices("cpu", "CPU", 0, 2)
SERVER = Devices("cuda", "GPU", 4, 64)
ONE = Devices("cuda", "GPU", 1, 8)


@pytest.mark.parametrize(
    ("wish", "devices", "expected"),
    [
        ({}, LAPTOP, ("supervisor", 1, True)),
        ({}, SERVER, ("supervisor", 4, False)),
        ({"num_processes": 2}, SERVER, ("supervisor", 2, False)),
        ({"num_processes": 3}, LAPTOP, ("supervisor", 3, True)),
        ({"cpu": True}, SERVER, ("supervisor", 1, True)),
        ({"cpu": True, "num_processes": 8}, SERVER, ("supervisor", 8, True)),
        ({"start_method": "fork", "num_processes": 2}, LAPTOP, ("fork", 2, True)),
        ({"start_method": "spawn"}, SERVER, ("spawn", 4, False)),
        ({"engine": "inline"}, ONE, ("inline", 1, False)),
        ({"engine": "inline", "num_processes": 1}, SERVER, ("inline", 1, False)),
        ({"engine": "local"}, SERVER, ("supervisor", 4, False)),
    ],
)
def test_the_choice_fits_the_wish_and_the_machine(wish, devices, expected):
    choice = choose(Launching(**wish), devices, can_fork=True)
    assert (choice.start, choice.size, choice.cpu) == expected


def test_a_system_that_can_t_fork_gets_fresh_pythons():
    choice = choose(Launching(num_processes=2), LAPTOP, can_fork=False)
    assert choice.start == "spawn"
    assert "can't fork" in choice.why


@pytest.mark.parametrize(
    ("wish", "devices", "can_fork", "words"),
    [
        ({"num_processes": 5}, SERVER, True, "num_processes=5 was asked for, but this machine has 4 GPUs"),
        ({"num_processes": 2}, ONE, True, "has 1 GPU. Ask for at most 1, or pass cpu=True"),
        ({"engine": "inline", "num_processes": 2}, LAPTOP, True, "this process is only one"),
        ({"engine": "inline", "timeout": 3.0}, LAPTOP, True, "nothing can end the function from outside"),
        ({"engine": "inline", "num_cpu_threads_per_process": 2}, LAPTOP, True, "this process has its threads already"),
        ({"start_method": "fork"}, LAPTOP, False, "start_method='fork' was asked for, but this system can't fork"),
        ({"start_method": "supervisor"}, LAPTOP, False, "start_method='supervisor'"),
    ],
)
def test_what_does_not_fit_says_what_was_asked_what_there_is_and_what_to_do(wish, devices, can_fork, words):
    with pytest.raises(LaunchError, match=words):
        choose(Launching(**wish), devices, can_fork)


HALF = Devices("cuda", "GPU", 2, 64, physical=4, variable="CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("wish", "size", "shows"),
    [
        ({"gpu_ids": "0,2,3"}, 3, {"CUDA_VISIBLE_DEVICES": "0,2,3"}),
        ({"gpu_ids": "3"}, 1, {"CUDA_VISIBLE_DEVICES": "3"}),
        ({"gpu_ids": "0,1", "num_processes": 1}, 1, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ({"gpu_ids": "GPU-8f,GPU-9a"}, 2, {"CUDA_VISIBLE_DEVICES": "GPU-8f,GPU-9a"}),
        ({"gpu_ids": "all"}, 2, {}),
        ({"gpu_ids": "9", "cpu": True, "num_processes": 2}, 2, {}),
    ],
)
def test_only_the_accelerators_that_were_named_count_and_are_shown(wish, size, shows):
    choice = choose(Launching(**wish), HALF, can_fork=True)
    assert choice.size == size
    assert choice.shows == shows


def test_a_machine_without_accelerators_has_none_to_name():
    choice = choose(Launching(gpu_ids="0,1"), LAPTOP, can_fork=True)
    assert (choice.size, choice.cpu, choice.shows) == (1, True, {})


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"gpu_ids": "0,4"}, "gpu_ids='0,4' was asked for, but this machine has no GPU 4"),
        ({"gpu_ids": "0,2", "num_processes": 3}, "num_processes=3 was asked for, but gpu_ids='0,2' shows 2 GPUs"),
        ({"gpu_ids": "1", "engine": "inline"}, "this process has its devices already"),
    ],
)
def test_accelerators_that_are_not_there_are_told(wish, words):
    with pytest.raises(LaunchError, match=words):
        choose(Launching(**wish), HALF, can_fork=True)


def test_the_reason_is_told():
    assert choose(Launching(), SERVER, True).why == "4 of 4 GPUs; forked by a supervisor"
    assert choose(Launching(num_processes=2), LAPTOP, True).why == "2 on the CPU; forked by a supervisor"
