"""Models of transformers' configurations train by Megatron's engine as in plain PyTorch, on CPUs behind a shim."""

import functools
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.utils import MegatronLMDummyScheduler, MegatronLMPlugin, broadcast_object_list
from tests.scale.megatron.cuda_on_cpu import on_ranks
from tests.scale.megatron.described import END, PARTS, gpt2, llama, loss_of_parts, samples, tokens
from tests.scale.megatron.gpt import (
    BATCH,
    HEADS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    assert_weights,
    batches,
    by_megatrons_names,
    plain_gpt,
    train_plainly,
)

ROUNDING = 1e-5
RATE, DECAY, CLIP, EPSILON = 0.01, 0.1, 0.5, 1e-3
WRITTEN = 4
WIDTHS, STAGES = {"tp_degree": 2, "num_micro_batches": PARTS}, {"pp_degree": 2, "num_micro_batches": PARTS}
COPIES: dict[str, Any] = {}


def prepared(model: Any, settings: dict[str, Any]) -> tuple[Any, ...]:
    torch.manual_seed(5)
    plugin = MegatronLMPlugin(gradient_clipping=CLIP, **settings)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, eps=EPSILON, weight_decay=DECAY)
    copies = accelerator.strategy.data_replicas[1]
    loader = DataLoader(samples(tokens()), batch_size=BATCH // (plugin.num_micro_batches * copies))
    schedule = MegatronLMDummyScheduler(optimizer, total_num_steps=len(batches()) * copies)
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def trained(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A training with the weights of the plain model, one that goes on from its middle, and what the model writes."""
    accelerator, model, optimizer, loader, schedule = prepared(gpt2(), settings)
    accelerator.strategy.load_model_state(model, by_megatrons_names(plain_gpt(True).state_dict(), True))
    written = model.megatron_generate(tokens()[:3, :WRITTEN], max_new_tokens=WRITTEN).tolist()
    model.eval()
    evaluated = [model(**batch).item() for batch in loader]
    model.train()
    losses, norms, rates = [], [], []
    for number, batch in enumerate(loader):
        if number == 2:
            accelerator.save_state(str(folder))
        loss = model(**batch)
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(schedule.get_last_lr()[0])
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return {
        "written": written,
        "evaluated": evaluated,
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "state": state,
        "resumed": resumed(settings, folder),
    }


def resumed(settings: dict[str, Any], folder: Path) -> list[float]:
    """The losses of the second half of a training, by a model that had other weights and has made a step."""
    accelerator, model, _, loader, _ = prepared(gpt2(), settings)
    model(**next(iter(loader)))
    accelerator.load_state(str(folder))
    losses = [model(**batch).item() for batch in accelerator.skip_first_batches(loader, 2)]
    accelerator.end_training()
    return losses


def of_llama(settings: dict[str, Any]) -> list[float]:
    """The losses of a Llama, whose weights are the same however it is split."""
    accelerator, model, _, loader, _ = prepared(llama(), settings)
    accelerator.strategy.load_model_state(model, drawn(accelerator.get_state_dict(model)))
    losses = [model(**batch).item() for batch in loader]
    accelerator.end_training()
    return losses


def drawn(complete: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights that depend on their names alone, of the shapes that the main process knows."""
    (shapes,) = broadcast_object_list([{name: weight.shape for name, weight in complete.items()}])
    seeds = {name: torch.Generator().manual_seed(crc32(name.encode())) for name in shapes}
    return {name: 0.1 * torch.randn(shape, generator=seeds[name]) for name, shape in shapes.items()}


def everything(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {**trained(settings, folder), "llama": of_llama(settings)}


@functools.cache
def plainly() -> dict[str, Any]:
    """The training by hand, on one process."""
    model = plain_gpt(True)
    flat = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [
        {"params": [weight for weight in model.parameters() if weight.ndim > 1]},
        {"params": flat, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, RATE, eps=EPSILON, weight_decay=DECAY)
    steps = tokens().split(BATCH)
    with torch.no_grad():
        evaluated = [loss_of_parts(model, batch).item() for batch in steps]
        written = tokens()[:3, :WRITTEN]
        for _ in range(WRITTEN):
            written = torch.cat([written, model(written)[:, -1:].argmax(dim=-1)], dim=1)
    rates = [RATE * (1 - number / len(steps)) for number in range(1, len(steps) + 1)]
    found = train_plainly(model, optimizer, loss_of=loss_of_parts, data=steps, clip=CLIP, rates=rates)
    return {
        "evaluated": evaluated,
        "written": [until_the_end(row) for row in written.tolist()],
        **found,
        "rates": rates,
        "state": by_megatrons_names(model.state_dict(), True),
    }


def until_the_end(row: list[int]) -> list[int]:
    ends = [place for place in range(WRITTEN, len(row)) if row[place] == END]
    return row[: ends[0]] + [END] * (len(row) - ends[0]) if ends else row


def of_transformers() -> dict[str, Any]:
    """A real GPT-2 with its own weights, in widths; what its loss is there, and here."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes = {"n_layer": 2, "n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    source = GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=END)).eval()
    batch = tokens()[:BATCH]
    labels = functional.pad(batch[:, 1:], (0, 1), value=END).masked_fill(batch == END, -100)
    with torch.no_grad():
        logits = source(batch).logits
    wanted = functional.cross_entropy(logits.transpose(1, 2), labels)
    accelerator, model, _, _, _ = prepared(source, {"tp_degree": 2, "return_logits": True})
    model.eval()
    output = model(input_ids=batch)
    accelerator.end_training()
    difference = (output.logits - logits).abs().max()
    return {"type": type(output).__name__, "losses": [output.loss.item(), wanted.item()], "by": difference.item()}


def test_a_model_of_transformers_comes_with_its_weights() -> None:
    for found in on_ranks(of_transformers, 2):
        assert found["type"] == "CausalLMOutputWithCrossAttentions"
        assert found["losses"][0] == pytest.approx(found["losses"][1], abs=ROUNDING)
        assert found["by"] < ROUNDING


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def run(name: str) -> Any:
        settings = {"widths": WIDTHS, "stages": STAGES, "copies": COPIES}[name]
        return on_ranks(everything, 2, settings, tmp_path_factory.mktemp(name) / "checkpoint")

    return run


@pytest.mark.timeout(180)
@pytest.mark.parametrize("way", ["widths", "stages", "copies"])
def test_an_engine_trains_resumes_and_writes_as_plain_pytorch_does(way: str, launched: Any) -> None:
    wanted = plainly()
    for found in launched(way):
        for name in ("evaluated", "losses", "norms", "rates"):
            assert found[name] == pytest.approx(wanted[name], abs=ROUNDING), name
        assert found["resumed"] == pytest.approx(found["losses"][2:], abs=1e-7)
        assert found["written"] == wanted["written"]
    assert_weights(launched(way)[0]["state"], wanted["state"], ROUNDING)


def test_a_llama_has_the_same_losses_however_it_is_split(launched: Any) -> None:
    whole = launched("copies")[0]["llama"]
    for way in ("widths", "stages"):
        for found in launched(way):
            assert found["llama"] == pytest.approx(whole, abs=ROUNDING)
