"""Sequences that DeepSpeed splits: two ranks learn as one does that has all tokens, and what can't be split is named."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError, DataError
from accelerate_nb.runtime.strategies.deepspeed.sequence_parallel import SequenceParallel
from accelerate_nb.runtime.world.world import Mesh, World
from accelerate_nb.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig
from tests.hf_suite.alias import install
from tests.ranks import run_on_ranks
from tests.runtime.strategies import tiny_llama
from tests.scale.deepspeed.zero import AUTO, LIMIT, arguments_of_trainer

SEQUENCES, LENGTH, AT_ONCE, RATE = 6, 8, 2, 0.1
# between the norms of the first two steps
NORM = 2.3


def llama(heads: int = 4, key_heads: int = 2, attention: str = "sdpa") -> Any:
    settings = {"hidden_size": 24, "num_key_value_heads": key_heads, "attn_implementation": attention}
    return tiny_llama.llama(heads=heads, **settings)


def samples() -> list[dict[str, torch.Tensor]]:
    """Sequences whose first tokens have no label, so that ranks have different numbers of them."""
    ids = torch.randint(0, 32, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.masked_fill(torch.arange(LENGTH) < 3, -100)} for row in ids]


def by_hand() -> dict[str, Any]:
    model, losses, norms = llama(), [], []
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for batch in DataLoader(samples(), AT_ONCE):
        loss = model(**batch).loss
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        evaluated = [model.eval()(**batch).loss.item() for batch in DataLoader(samples(), AT_ONCE)]
    return {"losses": losses, "norms": norms, "evaluated": evaluated, "weights": model.state_dict()}


def weighted_loss(accelerator: Accelerator, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of all labels, from those of each rank, as Accelerate's documentation has it."""
    inner, labels = accelerator.unwrap_model(model), batch["shift_labels"]
    logits = model(**batch).logits
    loss = inner.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=inner.config.vocab_size)
    group = accelerator.torch_device_mesh["sp"].get_group()
    losses, counts = all_gather(loss, group=group), all_gather((labels != -100).sum(), group=group)
    total: Any = sum(loss * count for loss, count in zip(losses, counts, strict=True) if count > 0)
    return total / sum(counts)


def in_parts(stage: int, folder: str, **sequences: Any) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=True,
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_clipping=10 * NORM),
        parallelism_config=ParallelismConfig(
            sp_size=2, sp_backend="deepspeed", sp_handler=DeepSpeedSequenceParallelConfig(**sequences)
        ),
    )
    plain = llama()
    optimizer = torch.optim.SGD(plain.parameters(), RATE)
    model, optimizer, loader = accelerator.prepare(plain, optimizer, DataLoader(samples(), AT_ONCE))
    found: dict[str, Any] = {"losses": [], "norms": []}
    assert len(loader) == SEQUENCES // AT_ONCE
    for batch in loader:
        assert batch["input_ids"].shape == (AT_ONCE, LENGTH // 2)
        assert batch["position_ids"][0].tolist() == ([0, 1, 2, 3], [4, 5, 6, 7])[accelerator.process_index]
        loss = weighted_loss(accelerator, model, batch)
        accelerator.backward(loss)
        found["norms"].append(accelerator.clip_grad_norm_(model.parameters(), NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
    model.eval()
    with torch.no_grad():
        found["evaluated"] = [weighted_loss(accelerator, model, batch).item() for batch in loader]
    found["weights"] = {name: weight.clone() for name, weight in accelerator.get_state_dict(model).items()}
    accelerator.save_state(folder)
    with torch.no_grad():
        for weight in plain.parameters():
            weight.data.zero_()
    accelerator.load_state(folder)
    loaded = accelerator.get_state_dict(model)
    assert all(torch.equal(weight, loaded[name]) for name, weight in found["weights"].items())
    with pytest.raises(DataError, match="batch of 1 sequences came, but DeepSpeed splits batches of 2"):
        accelerator.strategy.batch_cutter({"input_ids": torch.zeros(1, LENGTH)})
    with pytest.raises(ConfigurationError, match="without an optimizer"):
        accelerator.prepare(llama())
    found["apart"] = with_a_loader_apart(accelerator, model, loader)
    accelerator.end_training()
    return found


def with_a_loader_apart(accelerator: Accelerator, model: Any, loader: Any) -> dict[str, Any]:
    """What a loader gives that was prepared without the model, before and after it is cut for the model."""
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, model) is loader
    apart = accelerator.prepare(DataLoader(samples(), AT_ONCE))
    batches = list(apart)
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(model(**batch).loss.repeat(AT_ONCE)) for batch in apart]
    model.train()
    with pytest.raises(DataError, match="got a batch that is not cut for sp_size=2"):
        model(**batches[0])
    cut = accelerator.deepspeed_ulysses_dl_adapter(apart, model)
    parts = [(accelerator.gradient_state.end_of_dataloader, batch["input_ids"]) for batch in cut]
    rest = [batch["input_ids"] for batch in accelerator.skip_first_batches(cut, 3)]
    assert torch.equal(torch.stack(rest), torch.stack([part for _, part in parts[3:]]))
    assert len(cut) == 4
    assert [is_last for is_last, _ in parts] == [False, False, False, True]
    assert len(torch.cat(losses)) == SEQUENCES
    return {"ids": [batch["input_ids"] for batch in batches], "parts": [part for _, part in parts]}


def by_stages(folder: str) -> dict[int, dict[str, Any]]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    found = {
        0: in_parts(0, f"{folder}/0"),
        2: in_parts(2, f"{folder}/2", sp_attn_implementation="sdpa"),
        3: in_parts(3, f"{folder}/3", sp_seq_length=LENGTH, sp_seq_length_is_variable=False),
    }
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    return found


@pytest.mark.timeout(240)
def test_two_ranks_with_half_of_the_tokens_learn_as_one_with_all(tmp_path: Any) -> None:
    expected = by_hand()
    first, second = run_on_ranks(by_stages, 2, str(tmp_path), limit=LIMIT)
    for stage, found in first.items():
        for name in ("losses", "norms", "evaluated"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), (stage, name)
            assert found[name] == second[stage][name]
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=1e-6)
    apart = [ranks[2]["apart"] for ranks in (first, second)]
    ids = [sample["input_ids"] for sample in samples()]
    # each rank has every other batch, the last is filled up, and is a part of all of them once they are cut
    assert [batch.tolist() for batch in apart[0]["ids"]] == [torch.stack(ids[at : at + 2]).tolist() for at in (0, 4)]
    for index, found in enumerate(apart):
        tokens = [part.tolist() for part in found["parts"]]
        assert tokens == [
            [row[4 * index :][:4].tolist() for row in batch] for batch in (ids[0:2], ids[2:4], ids[4:6], ids[:2])
        ]


def by_the_trainer(folder: str, parts: int) -> dict[str, Any]:
    install()
    from accelerate import ParallelismConfig
    from transformers import Trainer

    arguments = arguments_of_trainer(
        folder,
        num_train_epochs=2,
        per_device_train_batch_size=AT_ONCE,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=1,
        eval_strategy="epoch",
        optim="sgd",
        learning_rate=RATE,
        max_grad_norm=NORM,
        parallelism_config=ParallelismConfig(sp_size=2, sp_backend="deepspeed") if parts > 1 else None,
        deepspeed={**AUTO, "zero_optimization": {"stage": 2}},
    )
    # with a mask, attention repeats heads of keys as often as the model says
    padded = [{**sample, "attention_mask": (torch.arange(LENGTH) < 6).long()} for sample in samples()[:5]]
    # fewer heads of keys than processes, which then share one
    trainer = Trainer(llama(key_heads=1), arguments, train_dataset=[*samples(), *samples()], eval_dataset=padded)
    trainer.train()
    wanted = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step")
    weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    history = [{name: entry[name] for name in wanted if name in entry} for entry in trainer.state.log_history]
    return {"history": history, "steps": trainer.state.max_steps, "weights": weights}


@pytest.mark.timeout(240)
def test_the_trainer_learns_the_same_from_parts(tmp_path: Any) -> None:
    (expected,) = run_on_ranks(by_the_trainer, 1, str(tmp_path), 1, limit=LIMIT)
    first, second = run_on_ranks(by_the_trainer, 2, str(tmp_path), 2, limit=LIMIT)
    assert first["steps"] == expected["steps"] == 2 * 2 * SEQUENCES // AT_ONCE // 2
    assert len(first["history"]) == len(expected["history"])
    for found, other in zip(first["history"], expected["history"], strict=True):
        assert found == pytest.approx(other, rel=1e-5)
    assert sum("eval_loss" in entry for entry in first["history"]) == 2
    torch.testing.assert_close(first["weights"], expected["weights"], rtol=0, atol=1e-6)
    torch.testing.assert_close(second["weights"], first["weights"], rtol=0, atol=0)


def split(**options: Any) -> SequenceParallel:
    world = World(0, 2, 0, 2, torch.device("cpu"), None, training_mesh=Mesh(sp=2))
    return SequenceParallel(world, DeepSpeedSequenceParallelConfig(**options))


@pytest.mark.parametrize(
    ("model", "batch_size", "message"),
    [
        (partial(nn.Linear, 2, 2), 2, "transformers' models alone, of which Linear is none"),
        (partial(llama, 3, 3), 2, "model of 3 heads, 3 of them for keys, which it does not divide"),
        (
            partial(llama, attention="eager"),
            2,
            "sp_attn_implementation='sdpa' was requested, but the model attends by 'eager'",
        ),
        (llama, None, "no train_micro_batch_size_per_gpu"),
    ],
)
def test_a_model_that_can_not_be_split_is_named(model: Callable[[], Any], batch_size: int | None, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        split(sp_attn_implementation="sdpa").register(model(), batch_size)


@pytest.mark.parametrize("types", ["linear_attention", "hybrid", "conv", None])
def test_layers_with_a_state_along_the_sequence_are_named(types: str | None) -> None:
    model = llama()
    if types is None:
        model.model.layers[1].mlp = torch.nn.LSTM(16, 16)
    else:
        model.config.layer_types = ["full_attention", types]
    with pytest.raises(ConfigurationError, match=f"recurrent layers: {types or 'LSTM'}"):
        split().register(model, 2)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": torch.zeros(2, 7)}, "length 7 should be cut in 2 equal pieces"),
        ({"pixels": torch.zeros(2, 8)}, "has no input_ids"),
        ([torch.zeros(2, 8)], "has no input_ids"),
        (
            {"input_ids": torch.zeros(2, 8), "attention_mask": torch.tensor([[0, 1] * 4] * 2)},
            "hides tokens before others",
        ),
    ],
)
def test_a_batch_that_can_not_be_cut_is_named(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        split().cut(batch)


def test_a_length_is_fixed_where_it_is_requested_so() -> None:
    with pytest.raises(DataError, match="length 6 came, but sp_seq_length=8"):
        split(sp_seq_length=8, sp_seq_length_is_variable=False).cut({"input_ids": torch.zeros(2, 6)})


def test_what_a_batch_brings_itself_is_cut_and_kept() -> None:
    tokens, positions = torch.arange(6)[None], torch.tensor([[0, 1, 2, 0, 1, 2]])
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": positions, "name": "a"}
    found = split().cut(batch)
    assert found.pop("name") == "a"
    assert {name: part.tolist() for name, part in found.items()} == {
        "input_ids": [[0, 1, 2]],
        "position_ids": [[0, 1, 2]],
        "shift_labels": [[1, 2, 3]],
    }
    assert set(batch) == {"input_ids", "labels", "position_ids", "name"}
