"""What was begun in the background is waited for."""

from __future__ import annotations

import threading

import pytest

from accelerate_nb.events import pending


@pytest.fixture(autouse=True)
def none_left():
    yield
    assert pending._begun.get() == []


def test_what_was_begun_is_waited_for_once_in_its_order():
    order = []
    waits = [lambda: order.append("first"), lambda: order.append("second")]
    for wait in waits:
        pending.begun(wait)
    pending.finish()
    pending.finish()
    assert order == ["first", "second"]


def test_what_is_over_is_not_waited_for():
    order = []

    def wait():
        order.append("waited")

    pending.begun(wait)
    pending.done(wait)
    pending.done(wait)
    pending.finish()
    assert order == []


def test_a_failure_is_raised_and_the_rest_still_stands():
    order = []

    def fails():
        raise OSError("disk full")

    pending.begun(fails)
    pending.begun(lambda: order.append("other"))
    with pytest.raises(OSError, match="disk full"):
        pending.finish()
    pending.finish()
    assert order == ["other"]


@pytest.fixture
def nothing_begun():
    yield
    pending._begun.get().clear()


def test_after_a_failure_what_can_be_saved_is_and_the_rest_is_not_waited_for(nothing_begun):
    order = []

    def fails():
        raise OSError("lost")

    pending.begun(lambda: order.append("waited"))
    pending.begun(lambda: order.append("waited"), fails)
    pending.begun(lambda: order.append("waited"), lambda: order.append("saved"))
    pending.salvage()
    assert order == ["saved"]


def test_what_can_t_be_saved_in_time_holds_no_failure_back(nothing_begun):
    never = threading.Event()
    ended = threading.Event()

    def waits():
        never.wait(60)
        ended.set()

    pending.begun(waits, waits)
    pending.salvage(patience=0.01)
    assert not ended.is_set()
    never.set()
    assert ended.wait(60)
