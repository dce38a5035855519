"""What was begun in the background is waited for."""

import threading

import pytest

from accelerate_nb.rank import background_tasks


@pytest.fixture(autouse=True)
def none_left():
    yield
    assert background_tasks._tasks.going == {}


def test_what_was_begun_and_is_not_over_is_waited_for_once_in_its_order_whatever_fails():
    calls = []

    def fails():
        raise OSError("disk full")

    is_over = lambda: calls.append("over")  # noqa: E731
    for wait in (lambda: calls.append("first"), is_over, fails, lambda: calls.append("second")):
        background_tasks.register(wait)
    for _ in range(2):
        background_tasks.forget(is_over)
    with pytest.raises(OSError, match="disk full"):
        background_tasks.finish()
    assert calls == ["first"]
    for _ in range(2):
        background_tasks.finish()
    assert calls == ["first", "second"]


@pytest.fixture
def nothing_begun():
    yield
    background_tasks._tasks.going.clear()


def test_after_a_failure_what_can_be_saved_is_and_the_rest_is_not_waited_for(nothing_begun):
    calls = []

    def fails():
        raise OSError("lost")

    background_tasks.register(lambda: calls.append("waited"))
    background_tasks.register(lambda: calls.append("waited"), fails)
    background_tasks.register(lambda: calls.append("waited"), lambda: calls.append("saved"))
    background_tasks.salvage()
    assert calls == ["saved"]


def test_what_can_t_be_saved_in_time_holds_no_failure_back(nothing_begun):
    never = threading.Event()
    ended = threading.Event()

    def waits():
        never.wait(60)
        ended.set()

    background_tasks.register(waits, waits)
    background_tasks.salvage(timeout=0.01)
    assert not ended.is_set()
    never.set()
    assert ended.wait(60)
