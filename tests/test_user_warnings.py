"""Warnings name the person's own line, whatever of this package lies between."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from accelerate_nb import Accelerator
from accelerate_nb.scheduler import AcceleratedScheduler
from accelerate_nb.tracking import GeneralTracker, register_tracker_class
from accelerate_nb.utils import FP8RecipeKwargs
from accelerate_nb.utils.modeling import check_device_map
from tests.ranks import run_on_ranks


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def in_a_data_class() -> None:
    FP8RecipeKwargs(backend="TE")


def in_a_function() -> None:
    check_device_map(torch.nn.Linear(1, 1), {"": 0, "nobody": 1})


def in_a_register() -> None:
    class Twice(GeneralTracker):
        name = "twice"
        requires_logging_directory = False

    register_tracker_class(Twice)
    register_tracker_class(Twice)


@pytest.mark.parametrize("calls", [in_a_data_class, in_a_function, in_a_register])
def test_a_warning_names_the_line_that_called(calls: Callable[[], None]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(ImportError):  # of the package that a setting is for
            calls()
    ours = [entry for entry in caught if "deprecated, please" not in str(entry.message)]
    assert [entry.filename for entry in ours] == [__file__]
    assert calls.__code__.co_firstlineno < ours[0].lineno <= calls.__code__.co_firstlineno + 10


def in_a_with_block() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(torch.nn.Linear(1, 1), torch.utils.data.DataLoader(Endless()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model], even_batches=False):
            pass
    accelerator.end_training()
    return [entry.filename for entry in caught]


def test_a_warning_of_a_with_block_names_the_block() -> None:
    assert run_on_ranks(in_a_with_block, 2) == [[__file__]] * 2


def schedules() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.prepare(optimizer, schedule)
        AcceleratedScheduler(schedule, optimizer)
    accelerator.end_training()
    return [entry.filename for entry in caught]


def test_a_schedule_s_notice_names_the_line_that_prepares_it() -> None:
    assert run_on_ranks(schedules, 2) == [[__file__] * 2, []]
