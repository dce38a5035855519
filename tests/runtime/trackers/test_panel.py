"""What is logged is seen in the panel, with no tracker at all."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from accelerate_nb import Accelerator, launch
from accelerate_nb.events.event_codec import from_line, to_line
from accelerate_nb.events.run_state import RunState
from accelerate_nb.rank.event_sink import connect


class Listener:
    rank = 0

    def __init__(self):
        self.view = RunState()
        self.events = []

    def send(self, event):
        again = from_line(to_line(event))
        self.events.append(again)
        self.view.apply(again)


@pytest.fixture
def listener():
    recorder = Listener()
    connect(recorder)
    yield recorder
    connect(None)


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
    shown = listener.view.rank(0)
    values = {name: metric.value for name, metric in shown.metrics.items()}
    assert math.isnan(values.pop("nan"))
    assert values == {
        "tensor": 0.25,
        "numpy": 3.0,
        "inner/train": 1.0,
        "inner/eval/loss": 2.0,
        "yes": 1.0,
        "infinite": -math.inf,
        "huge": math.inf,
        "odd": 1.0,
    }
    assert [(metric.step, metric.value) for metric in shown.series["tensor"]] == [(4, 0.5), (5, 0.25)]
    assert shown.metrics["odd"].step is None


def test_values_that_nobody_sees_are_not_waited_for():
    Accelerator(cpu=True).log({"tensor": torch.ones(1).as_subclass(Untouchable)})


class Untouchable(torch.Tensor):
    def item(self):
        raise AssertionError("somebody waited for the device")


def log_rank():
    accelerator = Accelerator(cpu=True)
    for step in range(3):
        accelerator.log({"rank": accelerator.process_index, "step": step}, step=step)
    accelerator.end_training()


def test_every_process_is_seen_in_a_run_that_names_no_tracker():
    run = launch(log_rank, num_processes=2, cpu=True)
    run.wait()
    for rank in (0, 1):
        shown = run.view.rank(rank).series
        assert [metric.value for metric in shown["rank"]] == [rank] * 3
        assert [metric.step for metric in shown["step"]] == [0, 1, 2]
