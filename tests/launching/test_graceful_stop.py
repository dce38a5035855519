"""Ranks that are asked to stop get one last step from their answers, and an end to the patience with them."""

from __future__ import annotations

from msgspec import structs

from accelerate_nb.events.model import HeldAt
from accelerate_nb.launching.step_requests import StopNegotiation
from accelerate_nb.rank.step_hold import STOP


def negotiation(*positions, stop_grace_period=2.0):
    found = StopNegotiation(ranks=range(len(positions)), stop_grace_period=stop_grace_period, now=0.0)
    for rank, position in enumerate(positions):
        found.reply(rank, position, now=1.0)
    return found


def at(steps, pace=0.1, *, checks=False):
    return HeldAt(0, STOP, steps, pace, checks)


def checked(times, pace=0.1):
    return HeldAt(0, STOP, None, pace, checks=True, stepless_checks=times)


def test_the_last_step_is_one_more_than_the_farthest_rank_has_made():
    assert negotiation(at(7), at(9), at(8)).last_step == 10


def test_there_is_no_last_step_before_all_have_answered():
    waits = StopNegotiation(ranks=[0, 1], stop_grace_period=2.0, now=0.0)
    waits.reply(0, at(7), now=1.0)
    assert waits.last_step is None
    assert not waits.needs_force([], now=1.9)
    assert waits.needs_force([], now=2.1)


def test_a_rank_that_makes_no_steps_is_not_waited_for():
    assert negotiation(at(7), None).needs_force([], now=1.0)
    assert negotiation(at(7), HeldAt(1, STOP, None)).needs_force([], now=1.0)


def test_a_slow_rank_gets_its_steps_beyond_the_stop_grace_period():
    slow = negotiation(at(7, pace=10.0), at(7))
    assert not slow.needs_force([], now=32.9)
    assert slow.needs_force([], now=33.1)


def test_ranks_that_save_are_given_the_time_for_it():
    saves = negotiation(structs.replace(at(7), saves=True), at(7))
    assert not saves.needs_force([], now=300.0)
    assert saves.needs_force([], now=304.0)


def test_ranks_that_have_all_come_take_as_long_as_they_like():
    came = negotiation(at(7), at(7))
    came.stopped(0, "after step 8")
    assert came.stopped_at == "after step 8"
    assert came.needs_force([], now=100.0)
    assert not came.needs_force([1], now=100.0)
    came.stopped(1, "after step 8")
    assert not came.needs_force([], now=100.0)


def test_an_exception_is_raised_unless_every_function_looks_for_the_stop():
    assert negotiation(at(7), at(7, checks=True)).raises
    assert not negotiation(at(7, checks=True), at(7, checks=True)).raises


def test_ranks_that_look_and_make_no_steps_stop_at_the_look_after_the_farthest_ones():
    agreed = negotiation(checked(7), checked(9))
    assert [agreed.stop_point_of(rank).stepless_checks for rank in range(2)] == [10, 10]
    assert not agreed.stop_point_of(0).raises


def test_looks_are_agreed_on_only_where_every_rank_looks():
    assert negotiation(checked(7), at(9)).stop_point_of(0).stepless_checks is None


def test_ranks_that_are_far_apart_stop_each_at_its_next_look():
    apart = negotiation(checked(7), checked(90))
    assert [apart.stop_point_of(rank).stepless_checks for rank in range(2)] == [8, 91]


def test_a_rank_that_is_some_looks_behind_gets_the_time_for_them():
    behind = negotiation(checked(7, pace=10.0), checked(9))
    assert not behind.needs_force([], now=52.9)
    assert behind.needs_force([], now=53.1)
