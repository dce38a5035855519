"""Random numbers begin where they are told to."""

import random
from typing import Any

import numpy as np
import pytest
import torch

import accelerate_nb.utils.random as ours
from accelerate_nb.errors import ConfigurationError
from tests.peers import Peer, under_both


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


@pytest.mark.parametrize(
    ("rng_type", "message"),
    [
        *(("dice", "Known ones are torch, cuda"), ("generator", "without a generator")),
        *(("npu", "no such device"), ("xla", "Leave it out")),
    ],
)
def test_a_generator_that_is_not_there_is_an_error(rng_type: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ours.synchronize_rng_state(rng_type)


def seeded(peer: Peer) -> list[Any]:
    """What is drawn after every way to seed, and after every generator was made equal."""
    accelerator = peer.Accelerator()
    utils, rank = peer.door("utils"), accelerator.process_index
    found: list[Any] = []
    for device_specific in (False, True):
        utils.set_seed(5, device_specific=device_specific)
        found.append(drawn())
    for rng_types in (["generator"], ["torch"], ["torch", "generator"]):
        torch.manual_seed(rank)
        generator = torch.Generator().manual_seed(10 + rank)
        utils.synchronize_rng_states(rng_types, generator=generator)
        found.append([torch.rand(1).item(), torch.rand(1, generator=generator).item()])
    torch.manual_seed(rank)
    peer.door("utils.random").synchronize_rng_state(utils.RNGType.TORCH)
    found.append(torch.rand(1).item())
    utils.set_seed(0, deterministic=True)
    return [*found, torch.are_deterministic_algorithms_enabled()]


def test_seeds_and_shared_states_are_accelerates() -> None:
    both = under_both(seeded, 2)
    assert both.ours == both.theirs
    (shared, first, *_, is_deterministic), (also_shared, second, *_) = both.ours
    assert shared == also_shared == first != second
    zero, one, ten, eleven = (torch.rand(1, generator=torch.manual_seed(seed)).item() for seed in (0, 1, 10, 11))
    assert [ranks[2:5] for ranks in both.ours] == [[[zero, ten]] * 3, [[one, ten], [zero, eleven], [zero, ten]]]
    assert [ranks[5] for ranks in both.ours] == [zero, zero]
    assert is_deterministic
