"""Whatever people log becomes numbers where it can."""

from __future__ import annotations

from enum import Enum, IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from accelerate_nb.runtime.trackers.base import plain, settings


class Kind(str, Enum):
    ONE = "one"


class Level(IntEnum):
    HIGH = 3


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
def test_one_element_is_a_number(value, number):
    found = plain({"a": {"b": value}})["a"]["b"]
    assert (found, type(found)) == (number, type(number))


def test_what_has_no_one_value_stays_as_it_is():
    for value in (torch.ones(2), torch.ones(1, device="meta"), np.ones(2)):
        assert plain(value) is value


def test_settings_are_what_any_format_can_hold():
    given = {
        "path": Path("a"),
        "kind": Kind.ONE,
        "level": Level.HIGH,
        "none": None,
        "yes": True,
        3: (1, torch.tensor(2), {"dtype": torch.float16}),
        "numpy": np.float64(0.5),
    }
    found = settings(given)
    assert found == {
        "path": "a",
        "kind": "one",
        "level": 3,
        "none": None,
        "yes": True,
        "3": [1, 2, {"dtype": "torch.float16"}],
        "numpy": 0.5,
    }
    assert yaml.safe_load(yaml.safe_dump(found)) == found
