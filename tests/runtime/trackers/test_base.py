"""A tracker of one's own says what every tracker has to say."""

from __future__ import annotations

import pytest

from accelerate_nb.errors import AccelerateNbError, IncompleteTrackerError
from accelerate_nb.tracking import GeneralTracker, on_main_process
from tests.peers import under_both


class NotStartedYet(GeneralTracker):
    name = "late"
    requires_logging_directory = False

    @property
    def tracker(self):
        return self.run  # there once it was started


class Nameless(GeneralTracker):
    tracker = None


def test_what_is_missing_is_named():
    with pytest.raises(IncompleteTrackerError, match=r"attributes: `name`, `requires_logging_directory`\. "):
        Nameless()
    with pytest.raises(NotImplementedError, match=r"`name`, `requires_logging_directory`, `tracker`\. "):
        GeneralTracker()
    assert issubclass(IncompleteTrackerError, AccelerateNbError)


def test_a_tracker_may_know_what_is_underneath_only_once_started():
    assert NotStartedYet().main_process_only


def test_a_blank_tracker_does_nothing():
    blank = GeneralTracker(_blank=True)
    blank.start()
    blank.store_init_configuration({})
    blank.log({"loss": 1})
    blank.finish()


class Counter:
    @on_main_process
    def count(self, *numbers, more=0):
        """Adds."""
        return sum(numbers) + more


class Main(Counter):
    main_process_only = True


class Everywhere(Counter):
    main_process_only = False


def count(peer):
    peer.Accelerator()  # Accelerate's processes are connected by it, on a machine without a GPU
    decorator = peer.door("tracking").on_main_process
    classes = [
        type("Again", (item,), {"count": decorator(item.count.__wrapped__)}) for item in (Counter, Main, Everywhere)
    ]
    return [item().count(1, 2, more=3) for item in classes]


def test_a_method_runs_on_the_main_process_unless_its_tracker_declares_otherwise():
    both = under_both(count, 2)
    assert both.theirs == both.ours == [[6, 6, 6], [6, None, 6]]
    assert (Counter.count.__name__, Counter.count.__doc__) == ("count", "Adds.")
