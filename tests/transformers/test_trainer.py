"""Hugging Face's `Trainer` finds its ranks in the workers of this package, and trains on this package's `Accelerator`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_nb import launch, notebook_launcher
from tests.hf_suite.alias import under_alias
from tests.ranks import run_on_ranks

pytest.importorskip("transformers")
SAMPLES, AT_ONCE, STEPS = 240, 8, 30


def tiny_gpt() -> Any:
    """A model that can count up to 63."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))


def counting(samples: int) -> list[torch.Tensor]:
    """Sequences in which what comes next can be learned."""
    start = torch.randint(0, 64, (samples, 1), generator=torch.Generator().manual_seed(0))
    return list((start + torch.arange(12)) % 64)


def train(folder: str, per_device_batch: int) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(0)
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=per_device_batch, learning_rate=1e-2, logging_steps=5,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    model = tiny_gpt()
    samples = [{"input_ids": item, "labels": item} for item in counting(SAMPLES)]
    trainer = Trainer(model, arguments, train_dataset=samples)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "rank": arguments.process_index,
        "world": arguments.world_size,
        "accelerate": trainer.accelerator.num_processes,
        "is_main": trainer.is_world_process_zero(),
        "losses": [entry["loss"] for entry in logged],
        "norms": [entry["grad_norm"] for entry in logged],
        "rates": [entry["learning_rate"] for entry in logged],
        "epochs": trainer.state.epoch,
        "steps": trainer.state.global_step,
        "total_batch": trainer.get_total_train_batch_size(arguments),
        "weights": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
    }


def train_with_ours(folder: str, per_device_batch: int) -> dict[str, Any]:
    import accelerate

    assert accelerate.__name__ == "accelerate_nb"
    return train(folder, per_device_batch)


def launched(folder: str, processes: int) -> Any:
    """Trained in workers of this package's launcher, with Hugging Face's own Accelerate."""
    arguments, options = (folder, AT_ONCE // processes), {"cpu": True, "results": "all", "timeout": 90}
    return notebook_launcher(train, arguments, num_processes=processes, **options)


def aliased(folder: str, processes: int) -> Any:
    """Trained with this package in the place of Accelerate."""
    return run_on_ranks(under_alias, processes, train_with_ours, folder, AT_ONCE // processes)


@pytest.mark.parametrize("way", [launched, aliased])
def test_the_trainer_learns_the_same_on_two_processes(way: Callable[[str, int], Any], tmp_path: Path) -> None:
    ranks = way(str(tmp_path), 2)
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert [rank["world"] for rank in ranks] == [rank["accelerate"] for rank in ranks] == [2, 2]
    assert [rank["is_main"] for rank in ranks] == [True, False]
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    first = ranks[0]
    assert first["steps"] == STEPS
    assert first["total_batch"] == AT_ONCE
    assert first["epochs"] == pytest.approx(STEPS / (SAMPLES / AT_ONCE))
    assert first["losses"][-1] < 0.5 * first["losses"][0]

    (alone,) = way(str(tmp_path), 1)
    assert alone["losses"] == pytest.approx(first["losses"], rel=1e-3)
    torch.testing.assert_close(alone["weights"], first["weights"], rtol=1e-2, atol=1e-3)
    if way is aliased:
        # and to the last bit what it learns under Accelerate
        theirs = run_on_ranks(train, 2, str(tmp_path), AT_ONCE // 2)
        torch.testing.assert_close(ranks, theirs, rtol=0, atol=0)


def train_by_hand() -> None:
    """A loop on Hugging Face's own Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert type(accelerator).__module__ == "accelerate.accelerator"
    model = torch.nn.Linear(8, 1)
    rows = torch.utils.data.TensorDataset(torch.ones(160, 8))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(rows, batch_size=4)
    )
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("loop", ["Trainer", "by hand"])
def test_steps_on_accelerates_own_accelerator_have_phases_and_speed(loop: str, tmp_path: Path) -> None:
    function, arguments = (train, (str(tmp_path), 4)) if loop == "Trainer" else (train_by_hand, ())
    run = launch(function, arguments, num_processes=2, cpu=True, timeout=90, panel="off")
    run.wait(90)
    for rank in map(run.view.rank, (0, 1)):
        assert rank.first_step is not None
        parts = [getattr(rank.first_step, part) for part in ("data", "forward", "backward", "optimizer", "idle")]
        assert min(parts) > 0
        assert rank.memory is not None
        assert rank.memory.optimizer > 0
        speeds = {"speed/step_time_s", "speed/samples_per_s"}
        assert rank.metrics.keys() >= speeds | {"optimizer/lr", "optimizer/grad_norm"}
        assert 2 <= (rank.metrics["speed/step_time_s"].step or 0) <= (STEPS if loop == "Trainer" else 20)
