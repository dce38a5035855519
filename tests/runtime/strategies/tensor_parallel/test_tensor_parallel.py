"""Layers split along their width compute what whole ones do, by a model's own plan or one by names of layers."""

import re
from collections.abc import Callable
from functools import partial
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
from tests.runtime.strategies.tiny_llama import by_hand, check_numbers, llama, trained

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

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        loss = None
        if labels is not None:
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


def trained_without_sum(make: Callable[[], nn.Module], arguments: dict[str, Any]) -> dict[str, Any]:
    tensor_parallel._placed_as = own_summand
    return trained(make, arguments)


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
    found = run_on_ranks(trained, ranks, make, arguments)
    check_numbers(found, make)
    assert [rank["coordinates"]["tp"] for rank in found] == [number % 2 for number in range(ranks)]
    for rank in found:
        assert rank["keeps parts of logits"] is keeps
        if make in (llama, tied_llama):
            assert rank["parts"]["model.layers.0.self_attn.q_proj.weight"] == (16 // ranks, 16)
            assert rank["parts"].get("lm_head.weight") == ((32 // ranks, 16) if make is llama else None)


@slow
def test_without_the_sum_of_gradients_it_ends_in_other_weights() -> None:
    found, _ = run_on_ranks(trained_without_sum, 2, plain, along({"plan": IN_PARTS}, **SPLIT))
    expected = by_hand(plain)["state"]
    assert max((found["state"][name] - weight).abs().max().item() for name, weight in expected.items()) > 1e-4


def test_layers_that_compute_while_they_send_are_requested_in_vain() -> None:
    with pytest.warns(UserWarning, match="Async tensor parallelism is currently not supported"):
        TorchTensorParallelConfig(enable_async_tp=True)


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
