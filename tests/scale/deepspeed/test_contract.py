"""Each of ZeRO's stages ends a training in the weights of one process, with the very loop that other strategies run."""

from functools import partial
from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.runtime.strategies.contract import ADAMW_ROUNDING, ROUNDING, Deletion, StrategyCase, difference, trained
from tests.scale.deepspeed.zero import CASES, SAVED_AFTER, by_stage

LIMIT = 110.0


def _parameters(case: StrategyCase, *deletions: Deletion):
    name = " without ".join([case.name, *(deletion.reduction for deletion in deletions)])
    return pytest.param(case, *deletions, id=name, marks=pytest.mark.slow if case.ranks > 2 else ())


@pytest.mark.parametrize("case", [_parameters(case) for case in CASES])
def test_a_training_ends_in_the_weights_of_one_process(case: StrategyCase, tmp_path: Path) -> None:
    found = run_on_ranks(
        trained, case.ranks, str(tmp_path / "checkpoint"), case.arguments, "no", False, SAVED_AFTER, limit=LIMIT
    )
    assert difference(found) < ROUNDING["no"]


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_training_with_adamw_ends_in_the_weights_of_one_process(stage: int, tmp_path: Path) -> None:
    arguments = partial(by_stage, stage)
    found = run_on_ranks(trained, 2, str(tmp_path / "checkpoint"), arguments, "no", True, SAVED_AFTER, limit=LIMIT)
    assert difference(found, adamw=True) < ADAMW_ROUNDING


@pytest.mark.parametrize(
    ("case", "deletion"), [_parameters(case, deletion) for case in CASES for deletion in case.deletions]
)
def test_without_a_reduction_it_ends_in_other_weights(case: StrategyCase, deletion: Deletion, tmp_path: Path) -> None:
    found = run_on_ranks(
        trained, case.ranks, str(tmp_path / "checkpoint"), deletion.arguments, "no", False, SAVED_AFTER, limit=LIMIT
    )
    assert difference(found) > 100 * ROUNDING["no"]
