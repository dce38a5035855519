"""What was begun in the background is waited for."""

from __future__ import annotations

import pytest

from accelerate_nb.events import pending


@pytest.fixture(autouse=True)
def none_left():
    yield
    assert pending._waits.get() == []


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
