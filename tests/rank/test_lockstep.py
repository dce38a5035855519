"""Ranks of one process pass their steps together, and none waits for one that has left."""

from __future__ import annotations

import threading

import pytest

from accelerate_nb.rank.lockstep import Lockstep, keep, lockstep
from accelerate_nb.rank_local import alone


def in_threads(*works):
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_nobody_leaves_a_step_before_all_have_been_there_one_at_a_time():
    together, inside, seen = Lockstep(3), [], []

    def works():
        for step in range(50):
            with together.turn():
                inside.append(step)
                assert len(inside) == inside.count(step) <= 3
            seen.append(step)
            with together.turn():
                inside.clear()

    in_threads(works, works, works)
    assert sorted(seen) == sorted(list(range(50)) * 3)


def test_one_that_has_left_is_a_lost_connection_for_the_others_also_for_those_that_come_later():
    together, errors = Lockstep(2), []

    def waits():
        for _ in range(2):
            with pytest.raises(ConnectionResetError, match="connection closed") as caught, together.turn():
                pass
            errors.append(caught.value)

    in_threads(waits, together.leave)
    assert len(errors) == 2


def test_one_that_comes_again_after_that_error_does_not_pass_alone():
    together, inside = Lockstep(2), []

    def waits():
        for _ in range(3):
            with pytest.raises(ConnectionResetError), together.turn():
                inside.append("alone")

    in_threads(waits, together.leave)
    assert inside == []


def test_whoever_has_met_goes_on_when_another_leaves_right_afterwards():
    for _ in range(200):
        together = Lockstep(2)

        def passes(together=together):
            with together.turn():
                pass
            together.leave()

        failed = []

        def tries(passes=passes, failed=failed):
            try:
                passes()
            except ConnectionResetError as error:
                failed.append(error)

        in_threads(tries, tries)
        assert not failed


def test_a_rank_passes_nothing_together_until_it_is_requested():
    item, other, together = alone(), alone(), Lockstep(1)
    item.run(keep, together)
    assert item.run(lockstep) is together
    assert other.run(lockstep) is None
