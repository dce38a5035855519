"""A small model of transformers, its training with nothing but PyTorch, and what a checkpoint gives it back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_nb.runtime.operations.sharded_tensors import local


def llama(*, tied: bool = False, heads: int = 4, **settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    widths = {"num_attention_heads": heads, "num_key_value_heads": heads, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **widths, **settings}))


def batches() -> torch.Tensor:
    return torch.randint(0, 32, (3, 4, 8), generator=torch.Generator().manual_seed(1))


def by_hand(make: Callable[[], nn.Module] = llama) -> dict[str, Any]:
    model, norms, losses = make(), [], []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in batches():
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"state": dict(model.state_dict()), "norms": norms, "losses": losses}


def trained(make: Callable[[], nn.Module], arguments: dict[str, Any], folder: str = "") -> dict[str, Any]:
    """The same training with an `Accelerator`, saved at its end: its numbers, and which parts of weights this rank has."""
    from accelerate_nb import Accelerator

    accelerator = Accelerator(cpu=True, **arguments)
    model, optimizer = accelerator.prepare(made := make(), torch.optim.SGD(made.parameters(), 0.1, momentum=0.9))
    norms, losses = [], []
    replica, replicas = accelerator.strategy.data_replicas
    for batch in batches():
        samples = batch[replica::replicas]
        loss = accelerator.train_step(model, input_ids=samples, labels=samples)
        losses.append(accelerator.gather(loss).mean().item())
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    if folder:
        accelerator.save_state(folder)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=batches()[0]).logits
    weights = accelerator.unwrap_model(model).named_parameters()
    coordinates = accelerator.world.mesh.coordinates(accelerator.process_index)
    if accelerator.parallelism_config is not None:
        ranks = (
            accelerator.pipeline_parallel_rank,
            accelerator.data_parallel_shard_rank,
            accelerator.tensor_parallel_rank,
        )
        assert ranks == tuple(coordinates.get(axis, 0) for axis in ("pp", "dp_shard", "tp"))
    found = {
        "state": dict(accelerator.get_state_dict(model)),
        "norms": norms,
        "losses": losses,
        # each process gives what it has: with parts of a width, the whole of it
        "logits": accelerator.gather(logits),
        "keeps parts of logits": isinstance(logits, DTensor),
        "parts": {name: tuple(local(weight).shape) for name, weight in weights if not weight.is_meta},
        "coordinates": coordinates,
    }
    accelerator.end_training()
    # where the training is over, losses are torch's again
    outside = nn.functional.cross_entropy(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    assert not isinstance(outside, DTensor)
    return found


def check_numbers(found: list[dict[str, Any]], make: Callable[[], nn.Module]) -> None:
    """What `trained` found on each rank are the numbers of one process."""
    expected, model = by_hand(make), make().eval()
    torch.testing.assert_close(found[0]["state"], expected["state"], rtol=0, atol=1e-6)
    model.load_state_dict(found[0]["state"])
    with torch.no_grad():
        logits = model(input_ids=batches()[0]).logits
    for item in found:
        assert item["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert item["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        torch.testing.assert_close(item["logits"], torch.cat([logits] * len(found)), rtol=0, atol=1e-5)


def loaded(folder: str, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The complete weights that a checkpoint gives a model, with what its optimizer remembered."""
    from accelerate_nb import Accelerator

    accelerator = Accelerator(cpu=True, **arguments)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    accelerator.load_state(folder)
    # a weight of another stage of a pipeline has a state without numbers
    momenta = [kept["momentum_buffer"] for kept in optimizer.state.values() if not kept["momentum_buffer"].is_meta]
    assert momenta
    assert all(momentum.to(torch.float64).abs().sum() > 0 for momentum in momenta)
    return dict(accelerator.get_state_dict(model))
