"""What `Trainer` says of an evaluation is what it says under Hugging Face Accelerate, also where a rest is left at the end."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.hf_suite.alias import under_alias
from tests.ranks import run_on_ranks

pytest.importorskip("transformers")
SAMPLES = 13


@dataclass(frozen=True)
class Setting:
    """One way to evaluate: what `TrainingArguments` and its `AcceleratorConfig` are given, and over how many samples."""

    arguments: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    samples: int = SAMPLES
    batch: int = 4
    stream: bool = False


SETTINGS = {
    "plain": Setting(),
    "one batch is more than all": Setting(samples=3, batch=8),
    "single samples": Setting(batch=1),
    # theirs can gather nothing but the loss where processes have different numbers of samples
    "an uneven rest": Setting({"prediction_loss_only": True}, {"even_batches": False}),
    "split batches": Setting(config={"split_batches": True}),
    "dispatched": Setting(config={"dispatch_batches": True}),
    "dispatched and split": Setting(samples=14, config={"dispatch_batches": True, "split_batches": True}),
    "stream": Setting(stream=True),
    "the rest dropped": Setting(arguments={"dataloader_drop_last": True}),
    "losses alone, read by a worker": Setting(arguments={"prediction_loss_only": True, "dataloader_num_workers": 1}),
    "metrics batch by batch": Setting({"batch_eval_metrics": True, "include_for_metrics": ["loss", "inputs"]}),
    "brought to the host step by step": Setting(arguments={"eval_accumulation_steps": 2}),
}


class Stream(IterableDataset[Any]):
    """Samples one after the other, without a length."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def evaluate(folder: str) -> dict[str, Any]:
    """What an evaluation and a prediction give in every setting."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    return {name: evaluated(setting, folder) for name, setting in SETTINGS.items()}


def evaluated(setting: Setting, folder: str) -> dict[str, Any]:
    import transformers
    from transformers import Trainer, TrainingArguments

    transformers.set_seed(0)
    numbers = torch.randn(setting.samples, 4, generator=torch.Generator().manual_seed(0))
    samples = [{"x": x, "labels": 100 * x.sum() ** 3} for x in numbers]  # some lose much more than others
    arguments = TrainingArguments(
        folder, per_device_eval_batch_size=setting.batch, accelerator_config=dict(setting.config), report_to=[],
        disable_tqdm=True, use_cpu=True, seed=0, label_names=["labels"], **setting.arguments,
    )  # fmt: skip
    dataset = Stream(samples) if setting.stream else samples
    trainer = Trainer(Model(), arguments, eval_dataset=dataset, compute_metrics=Summed())
    found = trainer.evaluate()
    metrics = {name: found[name] for name in sorted(found) if not name.endswith(("time", "runtime", "per_second"))}
    if arguments.batch_eval_metrics:
        return metrics
    held = trainer.predict(dataset).predictions
    return {**metrics, "predictions": None if held is None else torch.as_tensor(held).flatten().tolist()}


class Model(torch.nn.Module):
    """A regression whose loss is a mean over the batch, as that of every model of `transformers` is."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        guess = self.linear(x)[:, 0]
        return {"loss": torch.nn.functional.mse_loss(guess, labels), "logits": guess}


class Summed:
    """How many samples there were, and the sum of their labels; batch by batch where it is asked so."""

    def __init__(self) -> None:
        self.labels: list[float] = []

    def __call__(self, seen: Any, compute_result: bool = True) -> dict[str, Any]:
        self.labels += torch.as_tensor(seen.label_ids).flatten().tolist()
        if not compute_result:
            return {}
        found = {"count": len(self.labels), "sum": sum(self.labels)}
        self.labels = []
        return found


@pytest.mark.parametrize("processes", [1, 2])
def test_an_evaluation_with_a_rest_gives_what_it_gives_under_accelerate(
    processes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folders = [str(tmp_path_factory.mktemp("evaluated")) for _ in range(2)]
    theirs = run_on_ranks(evaluate, processes, folders[0])
    ours = run_on_ranks(under_alias, processes, evaluate, folders[1])
    for rank, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        assert our.keys() == SETTINGS.keys()
        for name in SETTINGS:
            assert our[name] == their[name], (rank, name)
    assert len({found["eval_loss"] for found in ours[0].values()}) > 3  # a rest weighs
