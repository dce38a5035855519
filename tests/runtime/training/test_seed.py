"""Random numbers begin where they are told to."""

import random
from typing import Any

import numpy as np
import pytest
import torch

import accelerate_nb.utils.random as ours
from accelerate_nb.errors import ConfigurationError
from tests.peers import Peer, under_both
from tests.ranks import run_on_ranks


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def synchronized(rng_type: str) -> list[float]:
    from accelerate_nb.runtime.world.registry import current_world

    torch.manual_seed(current_world().rank)
    generator = torch.Generator().manual_seed(10 + current_world().rank)
    ours.synchronize_rng_states([rng_type], generator)
    return [torch.rand(1).item(), torch.rand(1, generator=generator).item()]


def test_a_synchronized_generator_is_the_main_processs() -> None:
    alone = [torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() for seed in (0, 1, 10, 11)]
    assert run_on_ranks(synchronized, 2, "torch") == [[alone[0], alone[2]], [alone[0], alone[3]]]
    assert run_on_ranks(synchronized, 2, "generator") == [[alone[0], alone[2]], [alone[1], alone[2]]]


@pytest.mark.parametrize(
    ("rng_type", "error", "message"),
    [
        ("dice", ConfigurationError, "Known ones are torch, cuda"),
        ("generator", ConfigurationError, "without a generator"),
        ("npu", ConfigurationError, "no such device"),
        ("xla", ConfigurationError, "Leave it out"),
    ],
)
def test_a_generator_that_is_not_there_is_an_error(rng_type: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ours.synchronize_rng_state(rng_type)


def seeded(peer: Peer) -> list[Any]:
    """What is drawn after every way to seed, and after every generator was made equal."""
    accelerator = peer.Accelerator()
    utils, rank = peer.door("utils"), accelerator.process_index
    found: list[Any] = []
    for device_specific in (False, True):
        utils.set_seed(5, device_specific=device_specific)
        found.append(drawn())
    generator = torch.Generator().manual_seed(rank)
    utils.synchronize_rng_states(["torch", "generator"], generator=generator)
    found.append([torch.rand(1).item(), torch.rand(1, generator=generator).item()])
    peer.door("utils.random").synchronize_rng_state(utils.RNGType.TORCH)
    found.append(torch.rand(1).item())
    utils.set_seed(0, deterministic=True)
    return [*found, torch.are_deterministic_algorithms_enabled()]


def test_seeds_and_shared_states_are_accelerates() -> None:
    both = under_both(seeded, 2)
    assert both.ours == both.theirs
    (shared, first, *_, is_deterministic), (also_shared, second, *_) = both.ours
    assert shared == also_shared == first != second
    assert is_deterministic
