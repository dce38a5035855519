"""Ranks that are asked to stop get one last step from their answers, and an end to the patience with them."""

from __future__ import annotations

from accelerate_nb.events.asks import Position
from accelerate_nb.launching.stopping import Asking


def asking(*positions, grace=2.0):
    found = Asking(ranks=range(len(positions)), grace=grace, now=0.0)
    for rank, position in enumerate(positions):
        found.answer(rank, position, now=1.0)
    return found


def at(steps, pace=0.1, *, looks=False):
    return Position(steps, pace, looks)


def test_the_last_step_is_one_more_than_the_farthest_rank_has_made():
    assert asking(at(7), at(9), at(8)).last_step == 10


def test_there_is_no_last_step_before_all_have_answered():
    waits = Asking(ranks=[0, 1], grace=2.0, now=0.0)
    waits.answer(0, at(7), now=1.0)
    assert waits.last_step is None
    assert not waits.is_in_vain([], now=1.9)
    assert waits.is_in_vain([], now=2.1)


def test_a_rank_that_makes_no_steps_is_not_waited_for():
    assert asking(at(7), None).is_in_vain([], now=1.0)


def test_a_slow_rank_gets_its_steps_beyond_the_grace():
    slow = asking(at(7, pace=10.0), at(7))
    assert not slow.is_in_vain([], now=32.9)
    assert slow.is_in_vain([], now=33.1)


def test_ranks_that_save_are_given_the_time_for_it():
    saves = asking(at(7)._replace(saves=True), at(7))
    assert not saves.is_in_vain([], now=300.0)
    assert saves.is_in_vain([], now=304.0)


def test_ranks_that_have_all_come_take_as_long_as_they_like():
    came = asking(at(7), at(7))
    came.come(0)
    assert came.came_to_it
    assert came.is_in_vain([], now=100.0)
    assert not came.is_in_vain([1], now=100.0)
    came.come(1)
    assert not came.is_in_vain([], now=100.0)


def test_an_exception_is_raised_unless_every_function_looks_for_the_stop():
    assert asking(at(7), at(7, looks=True)).raises
    assert not asking(at(7, looks=True), at(7, looks=True)).raises
