"""The parts of Megatron's engine: its data sets, a person's own functions, and what it refuses, on CPUs behind a shim."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.utils import (
    GPTTrainStep,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups,
)
from accelerate_nb.utils.megatron_lm import get_args, model_provider_func
from tests.scale.megatron.cuda_on_cpu import on_ranks
from tests.scale.megatron.described import END, described, gpt2, loss_of_parts, samples, tokens
from tests.scale.megatron.gpt import BATCH, LENGTH, by_megatrons_names, message_of, plain_gpt, train_plainly

ROUNDING, RATE, EPSILON, STEPS = 1e-5, 0.01, 1e-3, 3


def prepared(model: Any, loader: Any, *others: Any, precision: str = "no", **settings: Any) -> tuple[Any, ...]:
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, megatron_lm_plugin=MegatronLMPlugin(**settings))
    optimizer = torch.optim.AdamW(model.parameters(), RATE, eps=EPSILON, weight_decay=0.0)
    return accelerator, *accelerator.prepare(model, optimizer, loader, *others)


def losses_of(accelerator: Any, model: Any, loader: Any) -> list[float]:
    accelerator.strategy.load_model_state(model, by_megatrons_names(plain_gpt(True).state_dict(), True))
    found = [model(**batch).item() for batch, _ in zip(loader, range(STEPS), strict=False)]
    accelerator.end_training()
    return found


def loader_of_samples(size: int) -> DataLoader[Any]:
    return DataLoader(samples(tokens()), batch_size=size)


def plainly() -> list[float]:
    model = plain_gpt(True)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, eps=EPSILON, weight_decay=0.0)
    data = tokens().split(BATCH)[:STEPS]
    return train_plainly(model, optimizer, loss_of=loss_of_parts, data=data, clip=1.0)["losses"]


def mean_over_tokens() -> float:
    """The first loss as a mean over all tokens that are no padding, of whichever part."""
    batch = tokens()[:BATCH]
    wanted = functional.pad(batch[:, 1:], (0, 1), value=END).masked_fill(batch == END, -100)
    return functional.cross_entropy(plain_gpt(True)(batch).transpose(1, 2), wanted).item()


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
    found: dict[str, Any] = {}
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
    own = prepared(
        gpt2(),
        rows,
        custom_get_batch_function=get_batch,
        custom_loss_function=loss_function,
        custom_model_provider_function=provider,
        custom_prepare_model_function=lambda build: [build(True, True)],
        seq_length=LENGTH,
    )
    found["own"] = losses_of(*own[:2], own[3])
    found["calls"] = calls
    plugin = {"custom_train_step_class": Doubled, "gradient_clipping": 0.0}
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    accelerator.state.megatron_lm_plugin.custom_train_step_kwargs = {"accelerator": accelerator, "factor": 2}
    model, loader = accelerator.prepare(gpt2(), loader_of_samples(4))
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
    first = next(loader)
    found = {"shape": tuple(first["tokens"].shape), "test": tuple(next(test)["tokens"].shape)}
    of_ranks = accelerator.gather(first["tokens"]).chunk(2)
    found["differ"] = not torch.equal(*of_ranks)
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
    accelerator, model, _, loader = prepared(gpt2(), loader_of_samples(4), precision="bf16", **settings)
    warmup = get_args().lr_warmup_iters
    dtype = str(next(model.parameters()).dtype)
    averaged = avg_losses_across_data_parallel_group(
        [torch.tensor(float(accelerator.process_index)), torch.tensor(1.0)]
    )
    gathered = gather_across_data_parallel_groups({"a": torch.tensor(accelerator.process_index)})["a"].tolist()
    return {
        "losses": losses_of(accelerator, model, loader),
        "dtype": dtype,
        "averaged": averaged.tolist(),
        "gathered": gathered,
        "warmup": warmup,
    }


def on_copies(folder: Path) -> dict[str, Any]:
    return {"own": by_own_functions(), "data": of_data_sets(folder), "bf16": in_bf16()}


def test_the_engine_takes_functions_data_sets_and_precisions(tmp_path: Path) -> None:
    for found in on_ranks(on_copies, 2, tmp_path / "data"):
        own, data, bf16 = found["own"], found["data"], found["bf16"]
        plain = plainly()
        # it reports sums and counts, whose ratio is a mean over all tokens
        assert own["own"][0] == pytest.approx(mean_over_tokens(), abs=ROUNDING)
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


def in_parts_of_stages() -> list[float]:
    settings = {"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1}
    accelerator, model, _, loader = prepared(gpt2(), loader_of_samples(4), recompute_activations=True, **settings)
    return losses_of(accelerator, model, loader)


def on_stages() -> dict[str, Any]:
    interleaved = in_parts_of_stages()
    plugin = MegatronLMPlugin(pp_degree=2, num_micro_batches=2)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    model, loader = gpt2(), loader_of_samples(4)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    accelerator.strategy.megatron_lm_plugin.tensorboard_dir = "x"
    messages = [message_of(get_args), message_of(lambda: accelerator.prepare(model, loader))]
    accelerator.strategy.megatron_lm_plugin.tensorboard_dir = None
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    messages += [
        message_of(lambda: accelerator.prepare(model, optimizer)),
        message_of(lambda: accelerator.prepare(model, optimizer, loader, schedule)),
        message_of(lambda: accelerator.prepare(described(SimpleNamespace(model_type="t5")), loader)),
        message_of(lambda: accelerator.prepare(MegatronLMDummyScheduler(None))),
    ]
    engine = accelerator.prepare(gpt2(), loader)[0]
    batch = next(iter(loader))
    messages += [
        message_of(lambda: engine(**batch)),
        message_of(lambda: engine(batch["input_ids"])),
        message_of(lambda: engine.megatron_generate(batch["input_ids"], max_new_tokens=4)),
        message_of(lambda: engine.megatron_generate(batch["input_ids"], max_new_tokens=4, num_beams=2)),
        message_of(lambda: engine.eval_step(input_ids=batch["input_ids"][:3])),
        message_of(lambda: accelerator.prepare(gpt2(), loader)),
    ]
    accelerator.end_training()
    return {"interleaved": interleaved, "messages": messages}


REFUSED = [
    "asked for before there are any",
    "tensorboard_dir",
    "You must specify a training or evaluation dataloader",
    "You can't use a custom scheduler with Megatron-LM",
    "A model of the type 't5' was given to Megatron",
    "without a model of transformers",
    "it has no optimizer",
    "model(**batch)",
    "16 positions",
    "num_beams",
    "3 samples",
    "multiple models",
]


def test_the_engine_interleaves_stages_and_refuses_by_name() -> None:
    for found in on_ranks(on_stages, 2):
        assert found["interleaved"] == pytest.approx(plainly(), abs=ROUNDING)
        for text, message in zip(REFUSED, found["messages"], strict=True):
            assert text in message
