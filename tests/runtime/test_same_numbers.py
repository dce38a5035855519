"""A training gives the numbers that Hugging Face Accelerate gives."""

import pytest

from tests.peers import Peer, under_both
from tests.ranks import ONE_OR_TWO
from tests.runtime.loops import Numbers, Recipe, train

RECIPES = [
    Recipe(accumulation=3),
    Recipe(precision="bf16", accumulation=2, schedule="lambda"),
    *(
        pytest.param(recipe, marks=pytest.mark.slow)
        for recipe in (Recipe(), Recipe(accumulation=4, schedule="step", clip=False), Recipe(samples=11, dropout=0.3))
    ),
]


def with_accelerator(peer: Peer, recipe: Recipe) -> Numbers:
    return train(peer.Accelerator, recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_accelerate_gives_the_same_numbers(recipe: Recipe, size: int) -> None:
    both = under_both(with_accelerator, size, recipe)
    assert both.ours == both.theirs
