"""A training is saved whole and goes on as if it had never stopped."""

import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.utils.dataclasses import ProjectConfiguration
from tests.ranks import ONE_OR_TWO, run_on_ranks
from tests.runtime.checkpoints.test_kills import fill
from tests.runtime.loops import flat, net, samples


class Counter:
    """Something of one's own that has a state."""

    def __init__(self) -> None:
        self.count: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Training:
    """A training that can be stopped after any batch."""

    def __init__(self, precision: str = "no") -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
        model = net(dropout=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = DataLoader(samples(48), batch_size=4, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = prepared
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.losses: list[Any] = []

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.counter.count += 1
        draws = random.random(), float(np.random.rand()), torch.rand(1).item()
        self.losses.append((loss.item(), inputs.tolist(), draws, self.schedule.get_last_lr()))

    def epochs(self, count: int, save_at: int | None = None, folder: str = "") -> None:
        for _ in range(count):
            for inputs, targets in self.loader:
                self.step(inputs, targets)
                if self.counter.count == save_at:
                    self.accelerator.save_state(folder)


def straight_on(folder: str, save_at: int, precision: str) -> tuple[Any, Any]:
    training = Training(precision=precision)
    training.epochs(3, save_at, folder)
    return training.losses[save_at:], flat(training.model)


def resumed(folder: str, epochs: int, precision: str) -> tuple[Any, Any]:
    training = Training(precision=precision)
    torch.manual_seed(5)  # nothing of the beginning may matter
    training.accelerator.load_state(folder)
    training.epochs(epochs)
    return training.losses, flat(training.model)


@pytest.mark.parametrize("size", ONE_OR_TWO)
@pytest.mark.parametrize("when", ["in an epoch", "at an epoch's end"])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path, size: int, when: str, precision: str) -> None:
    folder, in_epoch = str(tmp_path / "saved"), 12 // size
    save_at = in_epoch + 3 if when == "in an epoch" else in_epoch
    straight = run_on_ranks(straight_on, size, folder, save_at, precision)
    after = run_on_ranks(resumed, size, folder, 2, precision)
    for (losses, weights), (losses_after, weights_after) in zip(straight, after, strict=True):
        assert losses_after == losses
        assert weights_after == weights


def saves(folder: str, precision: str = "no") -> list[str]:
    Training(precision).accelerator.save_state(folder)
    return sorted(path.name for path in Path(folder).iterdir())


def loads(folder: str) -> tuple[Any, list[str]]:
    training = Training()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        training.accelerator.load_state(folder)
    return flat(training.model), [str(item.message) for item in given]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_weights_load_on_another_number_of_processes_and_a_rank_without_random_states_warns(
    tmp_path: Path, before: int, after: int
) -> None:
    saved = run_on_ranks(saves, before, str(tmp_path / "saved"))
    # it is whole on every process when saving returns
    assert saved == [sorted(path.name for path in (tmp_path / "saved").iterdir())] * before
    expected = flat(Training().model)
    for rank, (weights, messages) in enumerate(run_on_ranks(loads, after, str(tmp_path / "saved"))):
        assert weights == expected
        assert ["random_states_1.pkl does not exist" in message for message in messages] == [True] * rank


def test_what_a_person_keeps_beside_a_checkpoint_stays(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run_on_ranks(saves, 1, str(folder), "fp16")
    (folder / "notes.txt").write_text("mine")
    run_on_ranks(saves, 1, str(folder))
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "scaler.pt").exists()  # the second training had none


def numbered(folder: str) -> tuple[list[str], int]:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    model = accelerator.prepare(net())
    for value in (1.0, 2.0, 3.0):
        fill(model, value)
        (Path(folder) / "checkpoints" / ".ipynb_checkpoints").mkdir(parents=True, exist_ok=True)
        accelerator.save_state()
    fill(model, 0.0)
    accelerator.load_state()
    kept = sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
    for project.iteration, project.total_limit in ((0, 2), (4, 0)):
        assert accelerator.save_state().is_dir()  # the new one stays, whatever its number is
    return kept, next(model.parameters()).flatten()[0].item()


@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_numbered_checkpoints_are_kept_up_to_a_limit(tmp_path: Path, size: int) -> None:
    expected = [".ipynb_checkpoints", "checkpoint_1", "checkpoint_2"], 3.0
    # with two ranks the checkpoints are on another file system than their project
    with tempfile.TemporaryDirectory(dir="/dev/shm" if size == 2 and Path("/dev/shm").is_dir() else None) as disk:
        (tmp_path / "checkpoints").symlink_to(disk)
        assert run_on_ranks(numbered, size, str(tmp_path)) == [expected] * size


def test_hooks_may_save_a_model_in_their_own_way(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())
    loaded: list[str] = []

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        torch.save(weights.pop(), Path(folder) / "mine.pt")

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder) / "mine.pt"))
        loaded.append(folder)

    handle = accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(tmp_path / "saved")
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["checkpoint.json", "mine.pt", "positions_0.pkl", "random_states_0.pkl"]
    before = flat(model)
    fill(model, 0.0)
    accelerator.load_state(tmp_path / "saved")
    assert flat(model) == before
    assert loaded == [str(tmp_path / "saved")]
    handle.remove()
    accelerator.save_state(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").exists()
    accelerator.end_training()


def test_places_that_are_missing_are_named_and_registered_objects_must_match(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="without a folder"):
        accelerator.save_state()
    with pytest.raises(ConfigurationError, match="automatic checkpoint naming is disabled"):
        accelerator.load_state()
    with pytest.raises(ConfigurationError, match="folder does not exist"):
        accelerator.load_state(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="Item at index 1"):
        accelerator.register_for_checkpointing(Counter(), object())
    accelerator.save_state(tmp_path / "saved")
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(CheckpointError, match="Found checkpoints: 0"):
        accelerator.load_state(tmp_path / "saved")
    accelerator.end_training()
