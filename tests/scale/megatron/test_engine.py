"""Models of transformers' configurations train by Megatron's engine as in plain PyTorch, on CPUs behind a shim."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy
import pytest
import torch
from torch.nn import Linear, Module, functional
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.utils import (
    GPTTrainStep,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    avg_losses_across_data_parallel_group,
    broadcast_object_list,
    gather_across_data_parallel_groups,
)
from accelerate_nb.utils.megatron_lm import get_args, model_provider_func
from tests.scale.megatron.cuda_on_cpu import on_ranks
from tests.scale.megatron.gpt import (
    BATCH,
    HEADS,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    assert_refused,
    assert_weights,
    batches,
    by_megatrons_names,
    plain_gpt,
    train_plainly,
)

END, PARTS = 0, 2
ROUNDING = 1e-5
RATE, DECAY, CLIP, EPSILON = 0.01, 0.1, 0.5, 1e-3
STEPS, WRITTEN = 3, 4


def is_of_first_stage(name: str, _weight: Any) -> bool:
    """Whether a weight is one that no later stage has."""
    return "position_embeddings" in name


SETTINGS: dict[str, dict[str, Any]] = {
    "widths": {"tp_degree": 2, "num_micro_batches": PARTS},
    # which learns as fast as the others, in a group of its own
    "stages": {"pp_degree": 2, "num_micro_batches": PARTS, "scale_lr_cond": is_of_first_stage, "lr_mult": 1 + 1e-9},
    "copies": {},
}


def described(config: Any) -> Linear:
    """A model that has nothing but the configuration of one of transformers."""
    model = Linear(1, 1)
    model.config = config
    return model


def gpt2_config(**settings: Any) -> Any:
    from transformers import GPT2Config

    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return GPT2Config(**sizes, eos_token_id=END, **settings)


def gpt2() -> Linear:
    return described(gpt2_config(activation_function="gelu", return_dict=False))


def llama() -> Linear:
    from transformers import LlamaConfig

    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "vocab_size": VOCABULARY,
    }
    return described(LlamaConfig(**sizes, eos_token_id=END, return_dict=False))


def tokens() -> torch.Tensor:
    return torch.cat([batch[:, :LENGTH] for batch in batches()])


def loader_of_samples() -> DataLoader[Any]:
    """Batches of a part of a step; there are two of them, in parts or on copies."""
    return DataLoader([{"input_ids": row} for row in tokens()], batch_size=BATCH // 2)


def next_tokens(batch: torch.Tensor) -> torch.Tensor:
    """The labels of tokens, an end after the last; none of padding."""
    return functional.pad(batch[:, 1:], (0, 1), value=END).masked_fill(batch == END, -100)


def mean_loss(model: Module, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(batch).transpose(1, 2), next_tokens(batch))


def loss_of_parts(model: Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean of the losses of equal parts, each a mean over tokens that are no padding."""
    return torch.stack([mean_loss(model, part) for part in batch.chunk(PARTS)]).mean()


def prepared(model: Any, *others: Any, precision: str = "no", decay: float = 0.0, **settings: Any) -> tuple[Any, ...]:
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, megatron_lm_plugin=MegatronLMPlugin(**settings))
    optimizer = torch.optim.AdamW(model.parameters(), RATE, eps=EPSILON, weight_decay=decay)
    return accelerator, *accelerator.prepare(model, optimizer, *others)


def with_schedule(model: Any, settings: dict[str, Any]) -> tuple[Any, ...]:
    copies = 1 if settings else 2
    schedule = MegatronLMDummyScheduler(None, total_num_steps=len(batches()) * copies)
    return prepared(model, loader_of_samples(), schedule, decay=DECAY, gradient_clipping=CLIP, **settings)


def load_plain_weights(accelerator: Any, model: Any) -> None:
    accelerator.strategy.load_model_state(model, by_megatrons_names(plain_gpt(True).state_dict(), True))


def trained(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A training with the weights of the plain model, what the model writes, one that goes on from its middle, and a Llama's."""
    accelerator, model, optimizer, loader, schedule = with_schedule(gpt2(), settings)
    load_plain_weights(accelerator, model)
    written = model.megatron_generate(tokens()[:3, :WRITTEN], max_new_tokens=WRITTEN).tolist()
    model.eval()
    evaluated = [model(**batch).item() for batch in loader]
    model.train()
    found: dict[str, Any] = {"written": written, "evaluated": evaluated, "losses": [], "norms": [], "rates": []}
    for number, batch in enumerate(loader):
        if number == 2:
            accelerator.save_state(str(folder))
        loss = model(**batch)
        accelerator.backward(loss)
        found["norms"].append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["rates"].append(schedule.get_last_lr()[0])
    found["state"] = accelerator.get_state_dict(model)
    accelerator.end_training()
    return {**found, "resumed": resumed(settings, folder), "llama": of_llama(settings)}


def resumed(settings: dict[str, Any], folder: Path) -> list[float]:
    """The losses of the second half of a training, by a model that had other weights and has made a step."""
    accelerator, model, _, loader, _ = with_schedule(gpt2(), settings)
    model(**next(iter(loader)))
    accelerator.load_state(str(folder))
    losses = [model(**batch).item() for batch in accelerator.skip_first_batches(loader, 2)]
    accelerator.end_training()
    return losses


def of_llama(settings: dict[str, Any]) -> list[float]:
    """The losses of a Llama, whose weights are the same however it is split."""
    accelerator, model, _, loader, _ = with_schedule(llama(), settings)
    accelerator.strategy.load_model_state(model, drawn(accelerator.get_state_dict(model)))
    losses = [model(**batch).item() for batch in loader]
    accelerator.end_training()
    return losses


def drawn(complete: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights that depend on their names alone, of the shapes that the main process knows."""
    (shapes,) = broadcast_object_list([{name: weight.shape for name, weight in complete.items()}])
    seeds = {name: torch.Generator().manual_seed(crc32(name.encode())) for name in shapes}
    return {name: 0.1 * torch.randn(shape, generator=seeds[name]) for name, shape in shapes.items()}


@functools.cache
def plainly() -> dict[str, Any]:
    """The training by hand, on one process."""
    model = plain_gpt(True)
    groups = [
        {"params": [weight for weight in model.parameters() if weight.ndim > 1]},
        {"params": [weight for weight in model.parameters() if weight.ndim == 1], "weight_decay": 0.0},
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
    from transformers import GPT2LMHeadModel

    torch.manual_seed(3)
    source = GPT2LMHeadModel(gpt2_config()).eval()
    batch = tokens()[:BATCH]
    with torch.no_grad():
        logits = source(batch).logits
    wanted = functional.cross_entropy(logits.transpose(1, 2), next_tokens(batch))
    accelerator, model, _, _ = prepared(source, loader_of_samples(), tp_degree=2, return_logits=True)
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
        return on_ranks(trained, 2, SETTINGS[name], tmp_path_factory.mktemp(name) / "checkpoint")

    return run


@pytest.mark.timeout(180)
@pytest.mark.parametrize("way", SETTINGS)
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


def losses_of(accelerator: Any, model: Any, loader: Any) -> list[float]:
    load_plain_weights(accelerator, model)
    found = [model(**batch).item() for batch, _ in zip(loader, range(STEPS), strict=False)]
    accelerator.end_training()
    return found


def losses_by_hand() -> list[float]:
    """The losses of the first steps without decay."""
    model = plain_gpt(True)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, eps=EPSILON, weight_decay=0.0)
    data = tokens().split(BATCH)[:STEPS]
    return train_plainly(model, optimizer, loss_of=loss_of_parts, data=data, clip=1.0)["losses"]


class Doubled(GPTTrainStep):
    """A person's own step, which learns from twice the loss."""

    def __init__(self, args: Any, accelerator: Any, factor: int) -> None:
        super().__init__(accelerator, args)
        self.factor = factor

    def get_loss_func(self, accelerator: Any) -> Any:
        usual = super().get_loss_func(accelerator)

        def loss_function(loss_mask: torch.Tensor, output: Any) -> Any:
            loss, reported = usual(loss_mask, output)
            return loss * self.factor, {"doubled": reported["lm loss"] * self.factor}

        return loss_function


def by_own_functions() -> dict[str, Any]:
    calls: list[str] = []

    def provider(pre_process: bool, post_process: bool) -> Any:
        calls.append("provider")
        return model_provider_func(pre_process, post_process)

    def get_batch(data_iterator: Any) -> Any:
        rows = next(data_iterator)["rows"]
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
        ends = torch.full((len(rows), 1), END)
        positions = torch.arange(LENGTH).expand(len(rows), LENGTH)
        return rows, torch.cat([rows[:, 1:], ends], dim=1), (rows != END).float(), mask, positions

    def loss_function(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
        total, count = (output * loss_mask).sum(), loss_mask.sum()
        return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}

    rows = DataLoader([{"rows": row} for row in tokens()], batch_size=4)
    accelerator, model, _, loader = prepared(
        gpt2(),
        rows,
        custom_get_batch_function=get_batch,
        custom_loss_function=loss_function,
        custom_model_provider_function=provider,
        custom_prepare_model_function=lambda build: [build(True, True)],
        seq_length=LENGTH,
    )
    found = {"own": losses_of(accelerator, model, loader), "calls": calls}
    torch.manual_seed(5)
    plugin = MegatronLMPlugin(custom_train_step_class=Doubled, gradient_clipping=0.0)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    accelerator.state.megatron_lm_plugin.custom_train_step_kwargs = {"accelerator": accelerator, "factor": 2}
    model, loader = accelerator.prepare(gpt2(), loader_of_samples())
    model.eval()
    found["doubled"] = losses_of(accelerator, model, loader)
    return found


def of_data_sets(folder: Path) -> dict[str, Any]:
    """The batches and losses of Megatron's own data sets, and of a provider of them."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    accelerator = Accelerator(cpu=True)
    prefix = str(folder / "tokens")
    if accelerator.is_main_process:
        folder.mkdir(exist_ok=True)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
        for row in tokens().repeat(8, 1):
            builder.add_document(row.tolist(), [LENGTH])
        builder.finalize(f"{prefix}.idx")
    accelerator.end_training()
    placeholder = MegatronLMDummyDataLoader(
        data_path=prefix, seq_length=LENGTH, micro_batch_size=2, split="80,10,10", data_cache_path=str(folder / "cache")
    )
    model = gpt2()
    schedule = MegatronLMDummyScheduler(None, total_num_steps=2 * STEPS)
    settings: dict[str, Any] = {"num_micro_batches": 2, "eval_iters": 1, "eval_interval": 2}
    accelerator, trained, _, loader, test, _ = prepared(model, placeholder, placeholder, schedule, **settings)
    first = next(loader)["tokens"]
    found = {"shape": tuple(first.shape), "test": tuple(next(test)["tokens"].shape)}
    found["differ"] = not torch.equal(*accelerator.gather(first).chunk(2))
    found["losses"] = losses_of(accelerator, trained, loader)

    longer = torch.cat([tokens(), torch.zeros(len(tokens()), 1, dtype=torch.long)], dim=1)
    own = {
        "custom_megatron_datasets_provider_function": lambda numbers: ([{"text": row} for row in longer], None, None)
    }
    rest = MegatronLMDummyDataLoader(seq_length=LENGTH, micro_batch_size=4)
    accelerator, trained, _, loader, _ = prepared(gpt2(), rest, schedule, **own)
    found["own"] = losses_of(accelerator, trained, loader)
    return found


def in_bf16() -> dict[str, Any]:
    settings = {"use_distributed_optimizer": True, "lr_warmup_iters": 2}
    accelerator, model, _, loader = prepared(gpt2(), loader_of_samples(), precision="bf16", **settings)
    rank = torch.tensor(accelerator.process_index)
    found = {
        "dtype": str(next(model.parameters()).dtype),
        "averaged": avg_losses_across_data_parallel_group([rank.float(), torch.tensor(1.0)]).tolist(),
        "gathered": gather_across_data_parallel_groups({"a": rank})["a"].tolist(),
        "warmup": get_args().lr_warmup_iters,
    }
    return {**found, "losses": losses_of(accelerator, model, loader)}


def on_copies(folder: Path) -> dict[str, Any]:
    return {"own": by_own_functions(), "data": of_data_sets(folder), "bf16": in_bf16()}


def test_the_engine_takes_functions_data_sets_and_precisions(tmp_path: Path) -> None:
    for found in on_ranks(on_copies, 2, tmp_path / "data"):
        own, data, bf16 = found["own"], found["data"], found["bf16"]
        plain = losses_by_hand()
        # it reports sums and counts, whose ratio is a mean over all tokens
        mean = mean_loss(plain_gpt(True), tokens()[:BATCH]).item()
        assert own["own"][0] == pytest.approx(mean, abs=ROUNDING)
        assert own["own"] == pytest.approx(plain, abs=0.02)
        assert own["calls"] == ["provider"]
        assert own["doubled"][0] / 2 == pytest.approx(plain[0], abs=ROUNDING)
        assert (data["shape"], data["test"], data["differ"]) == ((4, LENGTH), (4, LENGTH), True)
        assert len(data["losses"]) == STEPS
        assert data["own"][0] == pytest.approx(plain[0], abs=0.1)
        assert bf16["losses"] == pytest.approx(plain, abs=0.05)
        assert bf16["dtype"] == "torch.bfloat16"
        assert bf16["averaged"] == [0.5, 1.0]
        assert bf16["gathered"] == [0, 1]
        # also where no placeholder of a schedule was given
        assert bf16["warmup"] == 2


def recomputed() -> list[list[float]]:
    found = []
    for granularity in ("full", "selective"):
        settings = {"recompute_activations": True, "recompute_granularity": granularity}
        accelerator, model, _, loader = prepared(gpt2(), loader_of_samples(), **settings)
        found.append(losses_of(accelerator, model, loader))
    return found


def test_activations_are_computed_again_in_either_granularity() -> None:
    full, selective = on_ranks(recomputed, 1)[0]
    assert selective == pytest.approx(full, abs=ROUNDING)


def on_stages() -> list[float]:
    """The losses of interleaved stages, after which others are refused what an engine does not do."""
    settings = {"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1}
    accelerator, model, _, loader = prepared(gpt2(), loader_of_samples(), recompute_activations=True, **settings)
    losses = losses_of(accelerator, model, loader)
    plugin = MegatronLMPlugin(pp_degree=2, num_micro_batches=2)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    model, loader = gpt2(), loader_of_samples()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    accelerator.strategy.megatron_lm_plugin.tensorboard_dir = "x"
    assert_refused("asked for before there are any", get_args)
    assert_refused("tensorboard_dir", lambda: accelerator.prepare(model, loader))
    accelerator.strategy.megatron_lm_plugin.tensorboard_dir = None
    # a setting of the plugin counts as it is now
    accelerator.strategy.megatron_lm_plugin.num_layers_per_virtual_pipeline_stage = 3
    assert_refused("stage=3 was requested for 4 layers in 2 stages", lambda: accelerator.prepare(model, loader))
    accelerator.strategy.megatron_lm_plugin.num_layers_per_virtual_pipeline_stage = None
    accelerator.strategy.megatron_lm_plugin.other_megatron_args = {"padded_vocab_size": 8}
    assert_refused("padded_vocab_size=8 was requested for a vocabulary of", lambda: accelerator.prepare(model, loader))
    accelerator.strategy.megatron_lm_plugin.other_megatron_args = None
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    t5 = described(SimpleNamespace(model_type="t5"))
    for text, objects in (
        ("You must specify a training or evaluation dataloader", (model, optimizer)),
        ("You can't use a custom scheduler with Megatron-LM", (model, optimizer, loader, schedule)),
        ("A model of the type 't5' was given to Megatron", (t5, loader)),
        ("without a model of transformers", (MegatronLMDummyScheduler(None),)),
    ):
        assert_refused(text, lambda objects=objects: accelerator.prepare(*objects))
    engine = accelerator.prepare(gpt2(), loader)[0]
    batch = next(iter(loader))
    write = functools.partial(engine.megatron_generate, batch["input_ids"], max_new_tokens=4)
    assert_refused("it has no optimizer", lambda: engine(**batch))
    assert_refused("model(**batch)", lambda: engine(batch["input_ids"]))
    assert_refused("16 positions", write)
    assert_refused("num_beams", lambda: write(num_beams=2))
    assert_refused("3 samples", lambda: engine.eval_step(input_ids=batch["input_ids"][:3]))
    assert_refused("multiple models", lambda: accelerator.prepare(gpt2(), loader))
    accelerator.end_training()
    return losses


def test_the_engine_interleaves_stages_and_refuses_by_name() -> None:
    for losses in on_ranks(on_stages, 2):
        assert losses == pytest.approx(losses_by_hand(), abs=ROUNDING)
