"""What a worker brings back arrives, or says why it can't."""

import os
import threading

import pytest

from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.outcome import failure_of, read_result, write_result
from tests.transport.test_exception_chain import Holding

NOWHERE = CellSources({}, {})


@pytest.fixture
def file():
    descriptor = memory_file("test")
    yield descriptor
    os.close(descriptor)


def brought_back(file, error):
    write_result(file, RankResult(1, failure=failure_of(error, 1, NOWHERE), error=error, modules=("numpy",)))
    return read_result(file)


def test_a_value_comes_back_with_the_modules_that_were_loaded_and_before_it_is_written_nothing(file):
    assert read_result(file) is None
    result = RankResult(0, {"a": [1]}, modules=("numpy",))
    write_result(file, result)
    assert read_result(file) == result


class Unreadable:
    def __reduce__(self):
        return int, ("of another process",)


class Model:
    def __init__(self):
        self.layers = [threading.Lock()]


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ([b"x" * 10_000, threading.Lock()], "result[1] is a lock (TypeError: cannot pickle"),
        ({"loss": 1.0, "lock": threading.Lock()}, "result['lock'] is a lock (TypeError: cannot pickle"),
        ({"a": [1, Model()]}, "result['a'][1].layers[0] is a lock"),
        ((number for number in range(3)), "result is a generator"),
        (Unreadable(), "it can't be unpickled in this process (ValueError: invalid literal"),
    ],
)
def test_of_a_value_that_can_t_travel_the_part_is_named_and_the_value_is_none(file, value, part):
    write_result(file, RankResult(0, value, modules=("numpy",)))
    found = read_result(file)
    assert (found.value, found.modules) == (None, ("numpy",))
    assert found.left_out.startswith(part)


def test_a_value_that_is_not_wanted_is_not_pickled(file):
    class Picklable:
        def __reduce__(self):
            raise AssertionError("it was pickled")

    write_result(file, RankResult(0, Picklable()), is_wanted=False)
    assert read_result(file) == RankResult(0)


def test_an_exception_comes_back_with_what_it_holds(file):
    found = brought_back(file, Holding([1, 2]))
    assert (type(found.error), found.error.held, found.modules) == (Holding, [1, 2], ("numpy",))
    assert (found.failure.rank, found.failure.message) == (1, "holding something")


def test_an_exception_whose_message_can_t_be_had_is_a_failure_all_the_same(file):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    found = brought_back(file, Mute())
    assert (
        found.failure.message
        == "(its message can't be shown: test_an_exception_whose_message_can_t_be_had_is_a_failure_all_the_same.<locals>.Mute.__str__ fails)"
    )


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"), True),
        (RuntimeError("[..] Read error [127.0.0.1]:1: Connection reset by peer"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (BrokenPipeError(32, "Broken pipe"), True),
        (RuntimeError("shape mismatch"), False),
        (KeyError("connection closed"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_a_rank_that_only_lost_its_connection_is_distinguished_from_one_that_failed(error, lost):
    assert failure_of(error, 0, NOWHERE).lost_connection is lost


def test_what_is_reported_of_a_message_is_less_than_one_between_processes_may_be():
    assert failure_of(ValueError("x" * (1 << 21)), 0, NOWHERE).message.endswith("x … (1,048,576 more characters)")


def test_an_interrupt_was_ours():
    assert failure_of(KeyboardInterrupt(), 0, NOWHERE).ended_by_us
    assert not failure_of(SystemExit(1), 0, NOWHERE).ended_by_us
