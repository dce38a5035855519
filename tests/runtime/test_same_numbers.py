"""A training gives the numbers that Hugging Face Accelerate and hand-written PyTorch give."""

import pytest

from tests.peers import Peer, under_both
from tests.ranks import ONE_OR_TWO, run_on_ranks
from tests.runtime.loops import Numbers, Recipe, train, train_by_hand

RECIPES = [
    Recipe(),
    Recipe(accumulation=3),
    Recipe(accumulation=4, schedule="step", clip=False),
    Recipe(precision="bf16", accumulation=2, schedule="lambda"),
    Recipe(samples=11, dropout=0.3),
]


def with_accelerator(peer: Peer, recipe: Recipe) -> Numbers:
    return train(peer.Accelerator, recipe)


def by_hand(recipe: Recipe) -> Numbers:
    from accelerate_nb import PartialState

    PartialState(cpu=True)  # connects the processes; the rest is PyTorch's
    return train_by_hand(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_accelerate_gives_the_same_numbers(recipe: Recipe, size: int) -> None:
    both = under_both(with_accelerator, size, recipe)
    assert both.ours == both.theirs


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(samples=48, shuffle=False, accumulation=5, schedule="step"),
        Recipe(samples=48, shuffle=False, precision="bf16", schedule="lambda"),
        Recipe(samples=48, shuffle=False, precision="fp16", accumulation=2, schedule="lambda"),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_plain_pytorch_gives_the_same_numbers(recipe: Recipe, size: int) -> None:
    trained = run_on_ranks(with_accelerator, size, Peer("accelerate_nb"), recipe)
    for ours, plain in zip(trained, run_on_ranks(by_hand, size, recipe), strict=True):
        assert (ours.losses, ours.weights) == (plain.losses, plain.weights)
        assert (ours.rates, ours.synced) == (plain.rates, plain.synced)
        assert str(ours.norms) == str(plain.norms)  # an overflow's norm is nan, which equals nothing
