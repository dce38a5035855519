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
        ({"start_method": "fork"}, LAPTOP, False, "start_method='fork' was asked for, but this system can't fork"),
        ({"start_method": "supervisor"}, LAPTOP, False, "start_method='supervisor'"),
    ],
)
def test_what_does_not_fit_says_what_was_asked_what_there_is_and_what_to_do(wish, devices, can_fork, words):
    with pytest.raises(LaunchError, match=words):
        choose(Launching(**wish), devices, can_fork)


def test_the_reason_is_told():
    assert choose(Launching(), SERVER, True).why == "4 of 4 GPUs; forked by a supervisor"
    assert choose(Launching(num_processes=2), LAPTOP, True).why == "2 on the CPU; forked by a supervisor"
