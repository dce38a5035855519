"""Every strategy over the GPUs' own backend ends a training in the weights of one process, each rank with a GPU of its own."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.devices import is_pretended
from tests.ranks import run_on_ranks
from tests.runtime.strategies.contract import CASES, Arguments, StrategyCase, difference, trained

pytestmark = pytest.mark.gpu


def on_so_many(ranks: int) -> list[Any]:
    """The strategies of so many ranks."""
    return [pytest.param(case, id=case.name) for case in CASES if case.ranks == ranks]


def on_gpus(arguments: Arguments) -> dict[str, Any]:
    """The arguments of a strategy, for GPUs."""
    return {**arguments(), "cpu": False}


def assert_ends_in_the_weights_of_one_process(case: StrategyCase, folder: Path) -> None:
    if torch.cuda.device_count() < case.ranks:
        pytest.skip(f"{case.name} takes {case.ranks} GPUs, and there are {torch.cuda.device_count()}")
    arguments = partial(on_gpus, case.arguments)
    found = run_on_ranks(trained, case.ranks, str(folder / "checkpoint"), arguments, limit=120)
    # a GPU adds up in other orders than the CPU, on which the expected weights are computed
    assert difference(found) < (1e-6 if is_pretended() else 1e-4)


@pytest.mark.parametrize("case", on_so_many(2))
def test_a_training_over_nccl_ends_in_the_weights_of_one_process(case: StrategyCase, tmp_path: Path) -> None:
    assert_ends_in_the_weights_of_one_process(case, tmp_path)


@pytest.mark.parametrize("case", on_so_many(4))
def test_a_training_on_four_gpus_ends_in_the_weights_of_one_process(case: StrategyCase, tmp_path: Path) -> None:
    assert_ends_in_the_weights_of_one_process(case, tmp_path)
