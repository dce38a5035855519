"""What is a rank's own is one object for its threads, and another one for another rank of the same process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from accelerate_nb.rank_local import RankLocal, alone, enter


def test_all_threads_of_a_rank_have_one_object():
    numbers: RankLocal[list[int]] = RankLocal(list)
    numbers.get().append(1)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(numbers.get()))
    thread.start()
    thread.join()
    assert seen == [[1]]
    assert seen[0] is numbers.get()


def test_another_rank_begins_with_nothing():
    numbers: RankLocal[list[int]] = RankLocal(list)
    numbers.get().append(1)
    other = alone()
    assert other.run(numbers.get) == []
    other.run(lambda: numbers.get().append(2))
    assert other.run(numbers.get) == [2]
    assert numbers.get() == [1]


def test_what_two_modules_keep_is_kept_apart():
    item: RankLocal[list[int]] = RankLocal(list)
    other: RankLocal[list[int]] = RankLocal(list)
    item.get().append(1)
    assert other.get() == []


def test_threads_that_enter_as_a_rank_have_what_is_its_own() -> None:
    mine: RankLocal[list[int]] = RankLocal(list)

    def entered_as(rank: int) -> tuple[bool, bool, int]:
        entered = enter(rank), enter(rank)
        mine.get().append(rank)
        return *entered, id(mine.get())

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second, ThreadPoolExecutor(1) as helper:
        results = [pool.submit(entered_as, rank).result() for pool, rank in ((first, 0), (second, 1), (helper, 1))]
    assert [entry[:2] for entry in results] == [(True, False)] * 3
    assert results[0][2] != results[1][2] == results[2][2]
    assert mine.get() == []
