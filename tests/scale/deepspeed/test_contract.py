"""Each of ZeRO's stages ends a training in the weights of one process, with the very loop that other strategies run."""

from functools import partial
from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.runtime.strategies.contract import ADAMW_ROUNDING, ROUNDING, difference, trained
from tests.scale.deepspeed.zero import SAVED_AFTER, by_stage

LIMIT = 110.0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_training_ends_in_the_weights_of_one_process(stage: int, ranks: int, tmp_path: Path) -> None:
    arguments = partial(by_stage, stage)
    found = run_on_ranks(trained, ranks, str(tmp_path / "checkpoint"), arguments, "no", False, SAVED_AFTER, limit=LIMIT)
    assert difference(found) < ROUNDING["no"]


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_training_with_adamw_ends_in_the_weights_of_one_process(stage: int, tmp_path: Path) -> None:
    arguments = partial(by_stage, stage)
    found = run_on_ranks(trained, 2, str(tmp_path / "checkpoint"), arguments, "no", True, SAVED_AFTER, limit=LIMIT)
    assert difference(found, adamw=True) < ADAMW_ROUNDING
