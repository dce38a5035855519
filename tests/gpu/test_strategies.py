"""Every strategy over the GPUs' own backend ends a training in the weights of one process, each rank with a GPU of its own."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.devices import is_pretended
from tests.ranks import run_on_ranks
from tests.runtime.strategies.contract import CASES, Arguments, Deletion, Outcome, StrategyCase, difference, trained

pytestmark = pytest.mark.gpu


def on_so_many(ranks: int) -> list[Any]:
    """The strategies of so many ranks."""
    return [pytest.param(case, id=case.name) for case in CASES if case.ranks == ranks]


def without_its_first_reduction(*names: str) -> list[Any]:
    """The strategies of these names, each without a reduction."""
    found = [(case, case.deletions[0]) for case in CASES if case.name in names]
    return [pytest.param(case, deletion, id=f"{case.name} without {deletion.reduction}") for case, deletion in found]


def on_gpus(arguments: Arguments) -> dict[str, Any]:
    """The arguments of a strategy, for GPUs."""
    return {**arguments(), "cpu": False}


def outcomes(case: StrategyCase, arguments: Arguments, folder: Path) -> Sequence[Outcome]:
    """What the training of a case ends in on its ranks."""
    if torch.cuda.device_count() < case.ranks:
        pytest.skip(f"{case.name} takes {case.ranks} GPUs, and there are {torch.cuda.device_count()}")
    return run_on_ranks(trained, case.ranks, str(folder / "checkpoint"), partial(on_gpus, arguments), limit=120)


def assert_ends_in_the_weights_of_one_process(case: StrategyCase, folder: Path) -> None:
    # a GPU adds up in other orders than the CPU, on which the expected weights are computed
    assert difference(outcomes(case, case.arguments, folder)) < (1e-6 if is_pretended() else 1e-4)


@pytest.mark.parametrize("case", on_so_many(2))
def test_a_training_over_nccl_ends_in_the_weights_of_one_process(case: StrategyCase, tmp_path: Path) -> None:
    assert_ends_in_the_weights_of_one_process(case, tmp_path)


@pytest.mark.parametrize("case", on_so_many(4))
def test_a_training_on_four_gpus_ends_in_the_weights_of_one_process(case: StrategyCase, tmp_path: Path) -> None:
    assert_ends_in_the_weights_of_one_process(case, tmp_path)


@pytest.mark.parametrize(("case", "deletion"), without_its_first_reduction("DDP", "FSDP", "split layers", "pipeline"))
def test_without_a_reduction_over_nccl_it_ends_in_other_weights(
    case: StrategyCase, deletion: Deletion, tmp_path: Path
) -> None:
    assert difference(outcomes(case, deletion.arguments, tmp_path)) > 1e-3


@pytest.mark.parametrize(("case", "deletion"), without_its_first_reduction("HSDP on 4"))
def test_without_a_reduction_on_four_gpus_it_ends_in_other_weights(
    case: StrategyCase, deletion: Deletion, tmp_path: Path
) -> None:
    assert difference(outcomes(case, deletion.arguments, tmp_path)) > 1e-3
