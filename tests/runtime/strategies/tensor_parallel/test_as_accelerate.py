"""A model that transformers loads in parts trains as under Accelerate, whose tensor parallelism takes no other."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peers import Peer, say_that_ranks_have_devices, under_both
from tests.runtime.strategies.test_fsdp_as_accelerate import whole
from tests.runtime.strategies.tiny_llama import batches, by_hand, llama

pytest.importorskip("transformers", minversion="5.0")


def trains(peer: Peer, folder: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    say_that_ranks_have_devices(peer)
    config = peer.door("parallelism_config").ParallelismConfig(tp_size=2)
    accelerator = peer.Accelerator(cpu=True, parallelism_config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        mesh = accelerator.torch_device_mesh
        model = AutoModelForCausalLM.from_pretrained(folder, tp_size=2, tp_plan="auto", device_mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms = [], []
    for batch in batches():
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        losses.append(loss.item())
        norms.append(whole(accelerator.clip_grad_norm_(model.parameters(), 0.5)).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole(value) for name, value in accelerator.unwrap_model(model).state_dict().items()}
    placements = {name: str(getattr(weight, "placements", None)) for name, weight in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights, "placements": placements}


def test_losses_norms_weights_and_parts_are_accelerates(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    both = under_both(trains, 2, str(tmp_path))
    expected = by_hand()
    for ours, theirs in zip(both.ours, both.theirs, strict=True):
        for name in ("losses", "norms", "weights"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)
        assert ours["placements"] == theirs["placements"]
        assert ours["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        torch.testing.assert_close(dict(ours["weights"]), expected["state"], rtol=0, atol=1e-6)
