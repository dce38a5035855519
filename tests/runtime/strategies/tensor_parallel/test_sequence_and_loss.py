"""Parts of sequences between split layers, and losses of split outputs, give the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from accelerate_nb import Accelerator, ConfigurationError, ParallelismConfig
from accelerate_nb.errors import DataError
from accelerate_nb.runtime.strategies.tensor_parallel import sequence_parts
from accelerate_nb.utils import TorchTensorParallelConfig
from tests.ranks import run_on_ranks
from tests.runtime.strategies.tiny_llama import batches, llama

pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def tied_llama() -> nn.Module:
    return llama(tied=True)


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


def keep_summand(weight: torch.Tensor) -> None:
    """Each process's own summand of a gradient counts as the sum."""

    def keep(gradient: DTensor) -> DTensor:
        if not any(placement.is_partial() for placement in gradient.placements):
            return gradient
        return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False)

    weight.register_hook(keep)


def trained(
    make: Callable[[], nn.Module], degrees: dict[str, int], settings: dict[str, Any], without_sum: bool = False
) -> dict[str, Any]:
    if without_sum:
        sequence_parts.share_gradient = keep_summand
    accelerator = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(**degrees, tp_handler=TorchTensorParallelConfig(**settings))
    )
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
    found = {
        "state": accelerator.get_state_dict(model),
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


def by_hand(make: Callable[[], nn.Module]) -> dict[str, Any]:
    model, norms, losses = make(), [], []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in batches():
        output = model(input_ids=batch, labels=batch)
        output.loss.backward()
        losses.append(output.loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"state": model.state_dict(), "norms": norms, "losses": losses, "logits": output.logits.detach()}


SEQUENCE, LOSS = {"sequence_parallel": True}, {"loss_parallel": True}
SPLIT, SHARDS = {"tp_size": 2}, {"dp_shard_size": 2, "tp_size": 2}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("make", "degrees", "settings"),
    [
        pytest.param(llama, SPLIT, SEQUENCE | LOSS, id="both"),
        pytest.param(tied_llama, SPLIT, SEQUENCE, id="tied", marks=slow),
        pytest.param(qwen3, SPLIT, {}, id="norms of heads"),
        pytest.param(qwen3, SPLIT, SEQUENCE, id="norms of heads, parts", marks=slow),
        pytest.param(gpt_neox, SPLIT, SEQUENCE | LOSS, id="biases", marks=slow),
        pytest.param(plain, SPLIT, SEQUENCE | LOSS | {"plan": PLAN}, id="a plan by names"),
        pytest.param(llama, SHARDS, SEQUENCE | LOSS, id="shards", marks=slow),
        pytest.param(qwen3, SHARDS, SEQUENCE, id="shards with norms of heads", marks=slow),
    ],
)
def test_a_training_has_the_numbers_of_one_process(
    make: Callable[[], nn.Module], degrees: dict[str, int], settings: dict[str, Any]
) -> None:
    found = run_on_ranks(trained, 4 if degrees == SHARDS else 2, make, degrees, settings)
    expected = by_hand(make)
    torch.testing.assert_close(dict(found[0]["state"]), dict(expected["state"]), rtol=0, atol=1e-6)
    for rank in found:
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert rank["kept"] is bool(settings.get("loss_parallel"))
        # each process gives what it has: with parts of a width, the whole of it
        copies = rank["logits"].unflatten(0, (len(found), -1))
        replicas = [copies[replica * 2] for replica in range(len(found) // 2)]
        samples = torch.stack(replicas, 1).flatten(0, 1)
        torch.testing.assert_close(samples, expected["logits"], rtol=0, atol=1e-5)


@slow
def test_without_the_sum_of_gradients_it_ends_in_other_weights() -> None:
    found, _ = run_on_ranks(trained, 2, llama, SPLIT, SEQUENCE, True)
    expected = by_hand(llama)["state"]
    assert max((found["state"][name] - weight).abs().max().item() for name, weight in expected.items()) > 1e-4


def two_lists() -> nn.Module:
    model = plain()
    model.others = nn.ModuleList([Block(), Block()])
    return model


def recurrent() -> nn.Module:
    model = plain()
    model.last = nn.GRU(16, 16)
    return model


def odd(settings: dict[str, Any]) -> str:
    accelerator = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(**settings))
    )
    model = accelerator.prepare(plain())
    with pytest.raises(DataError) as caught:
        model(torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 7, dtype=torch.long))
    return str(caught.value)


def refused(make: Callable[[], nn.Module], settings: dict[str, Any]) -> str:
    accelerator = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(**settings))
    )
    with pytest.raises(ConfigurationError) as caught:
        accelerator.prepare(make())
    return str(caught.value)


@slow
def test_what_can_not_be_cut_is_refused_on_all_processes() -> None:
    for text in run_on_ranks(odd, 2, {"plan": PLAN} | SEQUENCE):
        assert "Sequences of 7 were given to a model that sequence_parallel=True cuts in 2 parts" in text
    cases: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
        (
            recurrent,
            {"plan": PLAN} | SEQUENCE,
            "sequence_parallel=True was requested for Plain, which has recurrent layers: GRU (last)",
        ),
        (two_lists, {"plan": PLAN} | SEQUENCE, "Plain has 2 lists of equal blocks"),
        (
            plain,
            {"plan": {"blocks.*.up": "colwise_gather_output"}} | SEQUENCE,
            "does not say how blocks.0.down (Linear)",
        ),
        (
            plain,
            {"plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}} | LOSS,
            "blocks.1.down last, by 'rowwise'",
        ),
        (tied_llama, LOSS, "model.layers.1.mlp.down_proj last"),
    ]
    for make, settings, text in cases:
        assert all(text in found for found in run_on_ranks(refused, 2, make, settings))


def test_the_variables_choose_as_the_arguments_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchTensorParallelConfig().sequence_parallel is False
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SEQUENCE_PARALLEL", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_LOSS_PARALLEL", "1")
    found = TorchTensorParallelConfig()
    assert (found.sequence_parallel, found.loss_parallel) == (True, True)
    assert TorchTensorParallelConfig(sequence_parallel=False).sequence_parallel is False
