"""Each of ZeRO's stages ends a training in the weights of one process, with the very loop that other strategies run."""

from functools import partial
from pathlib import Path

import pytest

from tests.runtime.strategies.contract import (
    ADAMW_ROUNDING,
    ROUNDING,
    Deletion,
    StrategyCase,
    difference,
    parameters_of,
)
from tests.scale.deepspeed.zero import CASES, by_stage, outcomes


@pytest.mark.parametrize("case", [parameters_of(case) for case in CASES])
def test_a_training_ends_in_the_weights_of_one_process(case: StrategyCase, tmp_path: Path) -> None:
    assert difference(outcomes(tmp_path, case.ranks, case.arguments)) < ROUNDING["no"]


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_training_with_adamw_ends_in_the_weights_of_one_process(stage: int, tmp_path: Path) -> None:
    assert difference(outcomes(tmp_path, 2, partial(by_stage, stage), adamw=True), adamw=True) < ADAMW_ROUNDING


@pytest.mark.parametrize(
    ("case", "deletion"), [parameters_of(case, deletion) for case in CASES for deletion in case.deletions]
)
def test_without_a_reduction_it_ends_in_other_weights(case: StrategyCase, deletion: Deletion, tmp_path: Path) -> None:
    assert difference(outcomes(tmp_path, case.ranks, deletion.arguments)) > 100 * ROUNDING["no"]
