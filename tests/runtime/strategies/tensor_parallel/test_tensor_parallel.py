"""Layers split along their width compute what whole ones do, by a model's own plan or one by names of layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_nb import Accelerator, ConfigurationError, ParallelismConfig
from accelerate_nb.utils import TorchTensorParallelConfig, TorchTensorParallelPlugin
from tests.ranks import run_on_ranks
from tests.runtime.strategies.tiny_llama import batches, by_hand, llama

pytest.importorskip("transformers")


def trained(arguments: dict[str, Any], tied: bool, folder: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, **arguments)
    model = llama(tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    norms = []
    replica, replicas = accelerator.strategy.data_replicas
    for batch in batches():
        batch = batch[replica::replicas]
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    projection = model.model.layers[0].self_attn.q_proj.weight
    return {
        "state": accelerator.get_state_dict(model),
        "norms": norms,
        "part": tuple(projection.to_local().shape) if isinstance(projection, DTensor) else None,
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "type": str(accelerator.distributed_type),
        "rank": accelerator.world.mesh.coordinates(accelerator.process_index)["tp"],
    }


def along(**degrees: int) -> dict[str, Any]:
    return {"parallelism_config": ParallelismConfig(**degrees)}


def by_name() -> dict[str, Any]:
    return {"strategy": "tp"}


def by_old_plugin() -> dict[str, Any]:
    return {"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=2)}


@pytest.mark.parametrize(
    ("ranks", "arguments", "tied", "part"),
    [
        (2, along(tp_size=2), False, (8, 16)),
        (2, along(tp_size=2), True, (8, 16)),
        pytest.param(2, by_old_plugin(), False, (8, 16), marks=pytest.mark.slow),
        pytest.param(2, by_name(), False, (8, 16), marks=pytest.mark.slow),
        pytest.param(4, along(dp_shard_size=2, tp_size=2), False, (4, 16), marks=pytest.mark.slow),
        pytest.param(4, along(dp_shard_size=2, tp_size=2), True, (4, 16), marks=pytest.mark.slow),
    ],
    ids=["split", "tied", "plugin", "name", "shards", "shards of tied"],
)
def test_a_model_with_a_plan_of_its_own_has_the_numbers_of_one_process(
    ranks: int, arguments: dict[str, Any], tied: bool, part: tuple[int, int], tmp_path: Path
) -> None:
    found = run_on_ranks(trained, ranks, arguments, tied, str(tmp_path / "checkpoint"))
    state, norms = by_hand(tied)
    torch.testing.assert_close(dict(found[0]["state"]), dict(state), rtol=0, atol=1e-6)
    assert [item["rank"] for item in found] == [rank % 2 for rank in range(ranks)]
    for item in found:
        assert item["norms"] == pytest.approx(norms, rel=1e-5)
        assert (item["part"], item["tied"]) == (part, tied)


def loaded(folder: str, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, **arguments)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    accelerator.load_state(folder)
    momenta = [kept["momentum_buffer"] for kept in optimizer.state.values()]
    assert momenta
    assert all(momentum.to(torch.float64).abs().sum() > 0 for momentum in momenta)
    return dict(accelerator.get_state_dict(model))


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(2, along(tp_size=2), marks=pytest.mark.slow),
    ],
    ids=["one process", "DDP", "FSDP", "split"],
)
def test_a_checkpoint_of_split_layers_is_loaded_in_every_way(
    ranks: int, arguments: dict[str, Any], tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    (found, _) = run_on_ranks(trained, 2, along(tp_size=2), False, folder)
    state = run_on_ranks(loaded, ranks, folder, arguments)[0]
    torch.testing.assert_close(state, dict(found["state"]), rtol=0, atol=0)


class Plain(nn.Module):
    """A model without a plan of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})])


def refused(model: Callable[[], nn.Module], plan: dict[str, Any] | None) -> str:
    config = ParallelismConfig(tp_size=4, tp_handler=TorchTensorParallelConfig(plan=plan))
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    with pytest.raises(ConfigurationError) as caught:
        accelerator.prepare(model())
    return str(caught.value)


def few_heads() -> nn.Module:
    return llama(heads=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan", "text"),
    [
        (Plain, None, "Plain has no plan of its own"),
        (Plain, {"blocks.*.ups": "colwise"}, "no such layer. Did you mean blocks.0.up?"),
        (Plain, {"blocks.*.up": "columnwise"}, "Did you mean colwise?"),
        (Plain, {"blocks.*.up": "colwise"}, "does not divide the width 6 of blocks.0.up"),
        (few_heads, None, "does not divide num_attention_heads=2"),
    ],
    ids=["no plan", "no layer", "no way", "width", "heads"],
)
def test_what_can_not_be_split_is_named(model: Callable[[], nn.Module], plan: dict[str, Any] | None, text: str) -> None:
    assert all(text in found for found in run_on_ranks(refused, 4, model, plan))
