"""The `Accelerator` passes on to its trackers what it is told, on the main process."""

import warnings

import pytest
import torch

from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.world.registry import is_joined
from accelerate_nb.tracking import GeneralTracker
from tests.peers import under_both
from tests.ranks import run_on_ranks


class Diary:
    """What a tracker of one's own was told; mixed with either package's base class."""

    requires_logging_directory = False

    def __init__(self, name="diary", fails=()):
        self.name, self.entries, self.fails = name, [], fails
        super().__init__()

    @property
    def tracker(self):
        return self.entries

    def write(self, *entry):
        self.entries.append(entry)
        if entry[0] in self.fails:
            raise ConnectionError(f"{self.name} can't {entry[0]}")

    def start(self):
        self.write("start")

    def store_init_configuration(self, values):
        self.write("settings", values)

    def log(self, values, step=None, **kwargs):
        self.write("log", values, step, kwargs)

    def finish(self):
        self.write("finish")


class OurDiary(Diary, GeneralTracker):
    """A diary for this package."""


def keep_diaries(peer):
    base = peer.door("tracking").GeneralTracker
    first = type("First", (Diary, base), {})("first")
    second = type("Second", (Diary, base), {"main_process_only": False})("second")
    accelerator = peer.Accelerator(log_with=[first, second])
    blank = type(accelerator.get_tracker("first")).__mro__
    accelerator.init_trackers("digits", {"lr": 0.1}, {"first": {"ignored": 1}})
    accelerator.log({"loss": 0.5}, step=3, log_kwargs={"second": {"commit": False}})
    accelerator.log({"loss": "a text", "inner": {"a": 1}})
    found = accelerator.get_tracker("first"), accelerator.get_tracker("second", unwrap=True)
    same = (found[0] is first, found[1] is second.entries)
    # with Accelerate a rank that ends first would take the group from one that still connects
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return base in blank, same, len(accelerator.trackers), first.entries, second.entries


def test_trackers_receive_the_same_as_from_accelerate():
    both = under_both(keep_diaries, 2)
    assert both.theirs == both.ours
    main, other = both.ours
    assert main[3] == [
        ("start",),
        ("settings", {"lr": 0.1}),
        ("log", {"loss": 0.5}, 3, {}),
        ("log", {"loss": "a text", "inner": {"a": 1}}, None, {}),
        ("finish",),
    ]
    assert other == (True, (False, False), 0, [], [])


def ask_for_a_tracker():
    accelerator = Accelerator(log_with=OurDiary(), cpu=True)
    accelerator.init_trackers("digits")
    tracker = accelerator.get_tracker("diary")
    run = accelerator.get_tracker("diary", unwrap=True)
    if not accelerator.is_main_process:
        tracker.log_images({"a": []}, step=1)
        run.anything(1, colour="red")
        assert isinstance(tracker, GeneralTracker)
        assert not hasattr(tracker, "__len__")
    accelerator.end_training()
    return isinstance(tracker, OurDiary)


def test_elsewhere_a_tracker_does_nothing_whatever_is_called():
    assert run_on_ranks(ask_for_a_tracker, 2) == [True, False]


def test_a_tracker_that_fails_keeps_nothing_from_the_others():
    first, second, third = OurDiary("first"), OurDiary("second", fails=("log", "finish")), OurDiary("third")
    accelerator = Accelerator(log_with=[first, second, third], cpu=True)
    accelerator.init_trackers("digits")
    with pytest.raises(ConnectionError, match="second can't log"):
        accelerator.log({"loss": 1.0}, step=torch.tensor(2))
    with pytest.raises(ConnectionError, match="second can't finish"):
        accelerator.end_training()
    assert first.entries == third.entries == [("start",), ("log", {"loss": 1.0}, 2, {}), ("finish",)]
    assert not is_joined()


def test_a_tracker_that_can_not_start_is_not_ended():
    first, second = OurDiary("first"), OurDiary("second", fails=("start",))
    accelerator = Accelerator(log_with=[first, second], cpu=True)
    with pytest.raises(ConnectionError, match="second can't start"):
        accelerator.init_trackers("digits", {"lr": 1})
    accelerator.end_training()
    assert first.entries == [("start",), ("finish",)]
    assert second.entries == [("start",)]


def test_a_second_run_ends_the_first_and_each_ends_once_also_one_that_was_added_by_hand():
    diary = OurDiary()
    accelerator = Accelerator(log_with=diary, cpu=True)
    accelerator.init_trackers("first")
    accelerator.init_trackers("second")
    accelerator.log({"loss": 1})
    accelerator.end_training()
    accelerator.end_training()
    assert [entry[0] for entry in diary.entries] == ["start", "finish", "start", "log", "finish"]
    accelerator, diary = Accelerator(cpu=True), OurDiary()
    accelerator.trackers.append(diary)
    accelerator.log({"loss": 1})
    accelerator.end_training()
    assert [entry[0] for entry in diary.entries] == ["log", "finish"]


def test_values_that_no_tracker_was_begun_for_are_reported_once():
    accelerator = Accelerator(log_with=OurDiary(), cpu=True)
    with pytest.warns(UserWarning, match=r"log_with names diary, and `init_trackers` was not called"):
        accelerator.log({"loss": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.log({"loss": 1})
        accelerator.get_tracker("diary").log({"loss": 1})
        Accelerator(cpu=True).log({"loss": 1})  # nobody asked for a tracker


def test_an_unknown_tracker_lists_those_there_are_and_values_come_in_their_order():
    first, second = OurDiary("first"), OurDiary("second")
    second.entries = first.entries
    accelerator = Accelerator(log_with=[first, second], cpu=True)
    accelerator.init_trackers("digits")
    with pytest.raises(ConfigurationError, match=r"wandb is not an available tracker.* has first, second, panel"):
        accelerator.get_tracker("wandb")
    assert accelerator.get_tracker("panel", unwrap=True) is accelerator.panel
    accelerator.log({"loss": 1}, log_kwargs={"first": {"place": 1}, "second": {"place": 2}})
    accelerator.end_training()
    assert [entry[3]["place"] for entry in first.entries if entry[0] == "log"] == [1, 2]
