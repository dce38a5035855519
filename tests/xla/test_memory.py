"""Where memory is too small on an XLA device, what a profile shows of it, and where its random numbers begin."""

import json
from pathlib import Path
from typing import Any

import torch

from accelerate_nb import Accelerator
from accelerate_nb.rank.rng_state import current_random_states
from accelerate_nb.utils import ProfileKwargs, find_executable_batch_size, release_memory, set_seed
from tests.processes import python


def much(traces: str) -> dict[str, Any]:
    """What a launched function finds; it sets no seed before it has drawn."""
    import torch_xla

    accelerator = Accelerator()
    drawn = torch.rand(4, device=accelerator.device).tolist()
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=1 << 50)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        tensor = torch.zeros(batch_size if batch_size > 1 << 49 else 8, device=accelerator.device)
        torch_xla.sync()
        return tensor.numel()

    fitted = train()
    set_seed(3)
    seeded = torch.rand(4, device=accelerator.device).tolist()
    again = torch.rand(4, device=accelerator.device)
    with accelerator.profile(ProfileKwargs(output_trace_dir=traces)):
        release_memory((again @ again).item())
    return {"drawn": drawn, "tried": tried, "fitted": fitted, "seeded": seeded, "again": again.tolist()}


# The source of truth: plain torch_xla, whose generator is given a seed, and which syncs nothing in between.
_BY_HAND = """
import sys, torch, torch_xla
import torch_xla.core.xla_model as xm
for seed in (int(text) for text in sys.argv[1:]):
    xm.set_rng_state(seed)
    drawn = torch.rand(4, device="xla"), torch.rand(4, device="xla")
    torch_xla.sync()
    print(*[each.tolist() for each in drawn], sep=";")
"""


def test_a_function_on_an_xla_device(on_xla, tmp_path: Path):
    torch.manual_seed(1234567)
    torch.rand(3)
    states = current_random_states(gpus=True)
    assert states.tpu is None
    (found,) = on_xla(much, str(tmp_path))
    lines = python("-c", _BY_HAND, "1234567", "3", check=True, PJRT_DEVICE="CPU").stdout.splitlines()
    notebook, seeded = ([json.loads(part) for part in line.split(";")] for line in lines)
    # numbers begin with the notebook's seed, and with the one that is set
    assert found["drawn"] == notebook[0]
    assert [found["seeded"], found["again"]] == seeded
    # a batch that the device has no memory for is tried smaller
    assert len(found["tried"]) == 8
    assert found["tried"][-1] < 1 << 49 < found["tried"][-2]
    assert found["fitted"] == 8
    # what torch's profiler sees, and what torch_xla's does
    assert (tmp_path / "profile_0.json").stat().st_size > 0
    assert list((tmp_path / "xla_0").rglob("*.xplane.pb"))
