"""Copies and widths by Megatron end a training in the weights of one process, with the very loop that other strategies run."""

import pytest

from tests.ranks import run_on_ranks
from tests.runtime.strategies.contract import ADAMW_ROUNDING, ROUNDING, Outcome, StrategyCase, difference
from tests.scale.megatron.network import CASES, WITH_ADAMW, outcomes

LIMIT = 110.0
Found = list[dict[tuple[str, str], Outcome]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_on_ranks(outcomes, 2, str(tmp_path_factory.mktemp("contract")), limit=LIMIT)


def rounding(case: StrategyCase) -> float:
    return ADAMW_ROUNDING if case.name in WITH_ADAMW else ROUNDING["no"]


def difference_of(found: Found, case: StrategyCase, reduction: str = "") -> float:
    return difference([outcome[case.name, reduction] for outcome in found], adamw=case.name in WITH_ADAMW)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_training_ends_in_the_weights_of_one_process(case: StrategyCase, found: Found) -> None:
    assert difference_of(found, case) < rounding(case)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("case", "reduction"), [(case, deletion.reduction) for case in CASES for deletion in case.deletions]
)
def test_without_a_reduction_it_ends_in_other_weights(case: StrategyCase, reduction: str, found: Found) -> None:
    assert difference_of(found, case, reduction) > 10 * rounding(case)
