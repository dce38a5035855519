"""Layers split along their width compute what whole ones do, by a model's own plan or one by names of layers."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from accelerate_nb import Accelerator, ConfigurationError, ParallelismConfig
from accelerate_nb.runtime.strategies import tensor_parallel
from accelerate_nb.utils import TorchTensorParallelConfig, TorchTensorParallelPlugin
from tests.ranks import run_on_ranks
from tests.runtime.strategies.tiny_llama import batches, by_hand, llama, loaded

pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def qwen3() -> nn.Module:
    """A model whose attention has norms of its heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=4, tie_word_embeddings=False))


def gpt_neox() -> nn.Module:
    """A model with biases, and with attention and feed-forward side by side."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    dropouts = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, **dropouts))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        return found


class Plain(nn.Module):
    """A model without a plan, whose blocks hold their layers themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return type("Output", (), {"loss": loss, "logits": logits})


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Plain()


PLAN = {
    "embed": "embedding_rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}
# norms, and what is between blocks, have parts of the sequences
IN_PARTS = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": "sequence_parallel",
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def own_summand(_placements: Any, gradient: DTensor) -> DTensor:
    """Each process's own summand of a gradient counts as the sum."""
    if not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False)


def along(handler: dict[str, Any] | None = None, **degrees: int) -> dict[str, Any]:
    handler = {} if handler is None else {"tp_handler": TorchTensorParallelConfig(**handler)}
    return {"parallelism_config": ParallelismConfig(**degrees, **handler)}


def trained(
    make: Callable[[], nn.Module], arguments: dict[str, Any], folder: str = "", without_sum: bool = False
) -> dict[str, Any]:
    if without_sum:
        tensor_parallel._placed_as = own_summand
    accelerator = Accelerator(cpu=True, **arguments)
    model, optimizer = accelerator.prepare(made := make(), torch.optim.SGD(made.parameters(), 0.1, momentum=0.9))
    norms, losses = [], []
    replica, replicas = accelerator.strategy.data_replicas
    for batch in batches():
        output = model(input_ids=batch[replica::replicas], labels=batch[replica::replicas])
        accelerator.backward(output.loss)
        losses.append(accelerator.gather(output.loss.detach()).mean().item())
        logits = accelerator.gather(output.logits)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    if folder:
        accelerator.save_state(folder)
    found = {
        "state": accelerator.get_state_dict(model),
        "parts": {
            name: tuple(value.to_local().shape)
            for name, value in model.named_parameters()
            if isinstance(value, DTensor)
        },
        "rank": accelerator.world.mesh.coordinates(accelerator.process_index)["tp"],
        "norms": norms,
        "losses": losses,
        "kept": isinstance(output.logits, DTensor),
        "logits": logits.detach(),
    }
    accelerator.end_training()
    # where the training is over, losses are torch's again
    outside = nn.functional.cross_entropy(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    assert not isinstance(outside, DTensor)
    return found


tied_llama = partial(llama, tied=True)
LOSS = {"loss_parallel": True}
SPLIT, SHARDS = {"tp_size": 2}, {"dp_shard_size": 2, "tp_size": 2}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("make", "arguments", "keeps"),
    [
        pytest.param(llama, along(**SPLIT), False, id="split"),
        pytest.param(tied_llama, along(**SPLIT), False, id="tied"),
        pytest.param(llama, {"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=2)}, False, id="plugin", marks=slow),
        pytest.param(llama, {"strategy": "tp"}, False, id="name", marks=slow),
        pytest.param(tied_llama, along(**SHARDS), False, id="shards of tied", marks=slow),
        pytest.param(llama, along(LOSS, **SPLIT), True, id="loss"),
        pytest.param(qwen3, along(**SPLIT), False, id="norms of heads"),
        pytest.param(gpt_neox, along(LOSS, **SPLIT), True, id="biases", marks=slow),
        pytest.param(plain, along(LOSS | {"plan": PLAN}, **SPLIT), True, id="a plan by names", marks=slow),
        pytest.param(plain, along({"plan": IN_PARTS}, **SPLIT), False, id="parts of sequences"),
        pytest.param(llama, along(LOSS, **SHARDS), True, id="shards", marks=slow),
    ],
)
def test_a_training_has_the_numbers_of_one_process(
    make: Callable[[], nn.Module], arguments: dict[str, Any], keeps: bool, request: pytest.FixtureRequest
) -> None:
    ranks = 4 if "shards" in request.node.callspec.id else 2
    found, expected = run_on_ranks(trained, ranks, make, arguments), by_hand(make)
    torch.testing.assert_close(dict(found[0]["state"]), expected["state"], rtol=0, atol=1e-6)
    assert [rank["rank"] for rank in found] == [number % 2 for number in range(ranks)]
    for rank in found:
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert rank["kept"] is keeps
        if make in (llama, tied_llama):
            assert rank["parts"]["model.layers.0.self_attn.q_proj.weight"] == (16 // ranks, 16)
            assert ("lm_head.weight" in rank["parts"]) == (make is llama)
        # each process gives what it has: with parts of a width, the whole of it
        copies = rank["logits"].unflatten(0, (len(found), -1))
        replicas = [copies[replica * 2] for replica in range(len(found) // 2)]
        samples = torch.stack(replicas, 1).flatten(0, 1)
        torch.testing.assert_close(samples, expected["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (1, {}),
        pytest.param(2, {}, marks=slow),
        pytest.param(2, {"strategy": "fsdp"}, marks=slow),
        pytest.param(2, along(**SPLIT), marks=slow),
    ],
    ids=["one process", "DDP", "FSDP", "split"],
)
def test_a_checkpoint_of_split_layers_is_loaded_in_every_way(
    ranks: int, arguments: dict[str, Any], tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    (found, _) = run_on_ranks(trained, 2, llama, along(**SPLIT), folder)
    state = run_on_ranks(loaded, ranks, folder, arguments)[0]
    torch.testing.assert_close(state, dict(found["state"]), rtol=0, atol=0)


@slow
def test_without_the_sum_of_gradients_it_ends_in_other_weights() -> None:
    found, _ = run_on_ranks(trained, 2, plain, along({"plan": IN_PARTS}, **SPLIT), "", True)
    expected = by_hand(plain)["state"]
    assert max((found["state"][name] - weight).abs().max().item() for name, weight in expected.items()) > 1e-4


def refused(make: Callable[[], nn.Module], handler: dict[str, Any], size: int, text: str) -> None:
    accelerator = Accelerator(cpu=True, **along(handler, tp_size=size))
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        accelerator.prepare(make())


IN_BLOCKS = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


@slow
@pytest.mark.parametrize(
    ("make", "handler", "size", "text"),
    [
        (plain, {}, 2, "Plain has no plan of its own"),
        (plain, {"plan": {"blocks.*.ups": "colwise"}}, 2, "no such layer. Did you mean blocks."),
        (plain, {"plan": {"blocks.*.up": "columnwise"}}, 2, "Did you mean colwise?"),
        (plain, {"plan": {"blocks.*.up": "colwise"}}, 3, "does not divide the width 32 of blocks.0.up"),
        (partial(llama, heads=2), {}, 4, "does not divide num_attention_heads=2"),
        (plain, {"plan": IN_BLOCKS} | LOSS, 2, "blocks.1.down last, by 'rowwise'"),
        (tied_llama, LOSS, 2, "model.layers.1.mlp.down_proj last"),
    ],
    ids=["no plan", "no layer", "no way", "width", "heads", "a loss of no output", "a loss of tied weights"],
)
def test_what_can_not_be_split_is_named(
    make: Callable[[], nn.Module], handler: dict[str, Any], size: int, text: str
) -> None:
    run_on_ranks(refused, size, make, handler, size, text)


def test_the_variable_chooses_as_the_argument_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchTensorParallelConfig().loss_parallel is False
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_LOSS_PARALLEL", "1")
    assert TorchTensorParallelConfig().loss_parallel is True
    assert TorchTensorParallelConfig(loss_parallel=False).loss_parallel is False
