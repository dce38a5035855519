"""What is a rank's own is one object for its threads, and another one for another rank of the same process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from accelerate_nb.own import Own, alone, enter


def test_all_threads_of_a_rank_have_one_object():
    own: Own[list[int]] = Own(list)
    own.get().append(1)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(own.get()))
    thread.start()
    thread.join()
    assert seen == [[1]]
    assert seen[0] is own.get()


def test_another_rank_begins_with_nothing():
    own: Own[list[int]] = Own(list)
    own.get().append(1)
    other = alone()
    assert other.run(own.get) == []
    other.run(lambda: own.get().append(2))
    assert other.run(own.get) == [2]
    assert own.get() == [1]


def test_what_two_modules_keep_is_kept_apart():
    one: Own[list[int]] = Own(list)
    other: Own[list[int]] = Own(list)
    one.get().append(1)
    assert other.get() == []


def test_threads_that_enter_as_a_rank_have_what_is_its_own() -> None:
    mine: Own[list[int]] = Own(list)

    def one(rank: int) -> tuple[bool, bool, int]:
        entered = enter(rank), enter(rank)
        mine.get().append(rank)
        return *entered, id(mine.get())

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second, ThreadPoolExecutor(1) as helper:
        answers = [pool.submit(one, rank).result() for pool, rank in ((first, 0), (second, 1), (helper, 1))]
    assert [each[:2] for each in answers] == [(True, False)] * 3
    assert answers[0][2] != answers[1][2] == answers[2][2]
    assert mine.get() == []
