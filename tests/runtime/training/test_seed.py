"""Random numbers begin where they are told to."""

from __future__ import annotations

import random
from typing import Any

import accelerate.utils.random as theirs
import numpy as np
import pytest
import torch

import accelerate_nb.utils.random as ours
from accelerate_nb.errors import ConfigurationError
from tests.peers import Peer, under_both
from tests.ranks import run_on_ranks


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_a_seed_gives_the_numbers_that_accelerates_gives() -> None:
    ours.set_seed(11)
    mine = drawn()
    theirs.set_seed(11)
    assert drawn() == mine


def test_algorithms_can_be_made_deterministic() -> None:
    try:
        ours.set_seed(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def own_seed() -> tuple[Any, Any]:
    ours.set_seed(3, device_specific=True)
    specific = drawn()
    ours.set_seed(3)
    return specific, drawn()


def test_each_process_can_have_its_own_seed() -> None:
    (first, shared), (second, also_shared) = run_on_ranks(own_seed, 2)
    assert first == shared == also_shared != second


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
    assert both.ours[0][1] != both.ours[1][1]
