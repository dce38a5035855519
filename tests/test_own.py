"""What is a rank's own is one object for its threads, and another one for another rank of the same process."""

from __future__ import annotations

import threading

from accelerate_nb.own import Own, alone


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
