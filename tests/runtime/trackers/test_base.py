"""Trackers of one's own, the panel, and the values that all of them keep."""

import math
import warnings
from enum import Enum, IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from accelerate_nb import Accelerator
from accelerate_nb.errors import AccelerateNbError, IncompleteTrackerError
from accelerate_nb.events.event_codec import from_line, to_line
from accelerate_nb.events.run_state import RunState
from accelerate_nb.runtime.trackers.base import plain, settings
from accelerate_nb.tracking import GeneralTracker, on_main_process
from tests.peers import under_both


class NotStartedYet(GeneralTracker):
    name = "late"
    requires_logging_directory = False

    @property
    def tracker(self):
        return self.run  # there once it was started


class Pending(torch.Tensor):
    def item(self):
        raise AssertionError("the device was waited for")


def test_neither_a_value_nor_a_step_on_a_device_is_waited_for_where_nobody_listens():
    pending = torch.ones(()).as_subclass(Pending)
    Accelerator(cpu=True).log({"loss": pending}, step=pending)


def test_what_is_missing_is_named_and_what_is_underneath_may_be_known_only_once_started():
    assert NotStartedYet().main_process_only
    with pytest.raises(IncompleteTrackerError, match=r"attributes: `name`, `requires_logging_directory`\. "):
        type("Nameless", (GeneralTracker,), {"tracker": None})()
    with pytest.raises(NotImplementedError, match=r"`name`, `requires_logging_directory`, `tracker`\. "):
        GeneralTracker()
    assert issubclass(IncompleteTrackerError, AccelerateNbError)


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


def count(peer):
    peer.Accelerator()  # Accelerate's processes are connected by it, on a machine without a GPU
    decorator = peer.door("tracking").on_main_process
    again = {"count": decorator(Counter.count.__wrapped__)}
    declared = ({}, {"main_process_only": True}, {"main_process_only": False})
    return [type("Again", (), again | more)().count(1, 2, more=3) for more in declared]


def test_a_method_runs_on_the_main_process_unless_its_tracker_declares_otherwise():
    both = under_both(count, 2)
    assert both.theirs == both.ours == [[6, 6, 6], [6, None, 6]]
    assert (Counter.count.__name__, Counter.count.__doc__) == ("count", "Adds.")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (torch.tensor(2), 2),
        (torch.tensor([[0.5]], requires_grad=True), 0.5),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor(True), True),
        (np.float16(0.5), 0.5),
        (np.int64(7), 7),
        (np.array([3]), 3),
        ("text", "text"),
        (None, None),
        ([1], [1]),
    ],
)
def test_one_element_is_a_number_and_what_has_no_one_value_stays_as_it_is(value, number):
    found = plain({"a": {"b": value}})["a"]["b"]
    assert (found, type(found)) == (number, type(number))
    for several in (torch.ones(2), torch.ones(1, device="meta"), np.ones(2)):
        assert plain(several) is several


def test_settings_are_what_any_format_can_hold():
    nest = (1, torch.tensor(2), {"dtype": torch.float16})
    kind, level = Enum("Kind", {"ONE": "one"}, type=str), IntEnum("Level", {"HIGH": 3})
    given = {"path": Path("a"), "kind": kind.ONE, "level": level.HIGH, "none": None, 3: nest, "numpy": np.float64(0.5)}
    found = settings({"yes": True, **given})
    plain_nest = [1, 2, {"dtype": "torch.float16"}]
    expected = {"path": "a", "kind": "one", "level": 3, "none": None, "3": plain_nest, "numpy": 0.5}
    assert found == {"yes": True, **expected}
    assert yaml.safe_load(yaml.safe_dump(found)) == found


def test_numbers_of_every_kind_are_shown(listener):
    accelerator = Accelerator(cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.log(
            {
                "tensor": torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True),
                "numpy": np.int64(3),
                "inner": {"train": 1, "eval": {"loss": torch.tensor([2.0])}},
                "yes": True,
                "nan": math.nan,
                "infinite": torch.tensor(-math.inf),
                "huge": 10**400,
                "text": "not a number",
                "list": [1, 2],
                "nowhere": torch.ones((), device="meta"),
                "many": torch.ones(3),
            },
            step=torch.tensor(4),
        )
        accelerator.log({"tensor": 0.25}, step=np.int64(5))
        accelerator.log({"odd": 1}, step="last")
    view = RunState()
    for event in listener.events:
        view.apply(from_line(to_line(event)))
    shown = view.rank(0)
    values = {name: metric.value for name, metric in shown.metrics.items()}
    assert math.isnan(values.pop("nan"))
    nested = {"inner/train": 1.0, "inner/eval/loss": 2.0}
    assert values == {
        "tensor": 0.25, "numpy": 3.0, **nested, "yes": 1.0, "infinite": -math.inf, "huge": math.inf, "odd": 1.0
    }  # fmt: skip
    assert [(metric.step, metric.value) for metric in shown.series["tensor"]] == [(4, 0.5), (5, 0.25)]
    # one without a step has its number among the values
    assert shown.metrics["odd"].step == 0
