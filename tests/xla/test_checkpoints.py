"""What is saved on an XLA device: it goes on there bit for bit, and its files are those of a training on the CPU."""

import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate_nb.utils import find_tied_parameters, id_tensor_storage, load, load_checkpoint_in_model
from tests.ranks import run_on_ranks
from tests.runtime.checkpoints.test_interop import Odd
from tests.runtime.loops import samples


class Odder(Odd):
    """One with a weight in bf16 as well, two of one shape, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(8, 8, bias=False)
        self.short = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.drop = nn.Dropout(0.3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.third(self.drop(torch.relu(self.norm(self.second(self.first(inputs))))))
        return ((hidden @ self.turned.t()) * self.short.float()).sum(1, keepdim=True)


class Remembering:
    """Something of one's own, with a tensor of the device in its state."""

    def __init__(self, device: torch.device) -> None:
        self.mean = torch.zeros(3, device=device)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "again": [self.mean]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["again"][0].data_ptr() == state["mean"].data_ptr()
        self.mean = state["mean"].to(self.mean.device)


class Training:
    """One training, the same for every package and on every device; all that it draws depends on a seed."""

    def __init__(self, package: str = "accelerate_nb", seed: int = 0, **options: Any) -> None:
        found = import_module(package)
        import_module(f"{package}.utils").set_seed(seed)
        self.accelerator = found.Accelerator(**options)
        model = Odder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = DataLoader(samples(32), batch_size=4, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = prepared
        self.custom = Remembering(self.accelerator.device)
        self.accelerator.register_for_checkpointing(self.custom)
        self.count = 0
        self.records: list[Any] = []

    def epochs(self, count: int, *, at: dict[int, Any] | None = None) -> None:
        for _ in range(count):
            for inputs, targets in self.loader:
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                self.custom.mean += inputs.detach()[0, :3]
                self.count += 1
                self.records.append((loss.detach(), random.random(), float(np.random.rand()), inputs.sum()))
                if at and self.count in at:
                    at[self.count]()

    def numbers(self, since: int = 0) -> Any:
        """All that has happened since a step, and what has become of the training, in plain numbers."""
        records = [
            (loss.item(), python_draw, numpy_draw, total.item())
            for loss, python_draw, numpy_draw, total in self.records[since:]
        ]
        return records, self.state()

    def state(self) -> dict[str, Any]:
        """What the training is now."""
        inner = self.accelerator.unwrap_model(self.model)
        weights = {name: tensor.float().tolist() for name, tensor in inner.state_dict().items()}
        kept = {
            number: {name: tensor.float().tolist() for name, tensor in values.items()}
            for number, values in self.optimizer.state_dict()["state"].items()
        }
        rate = self.schedule.get_last_lr()
        return {"weights": weights, "optimizer": kept, "rate": rate, "custom": self.custom.mean.tolist()}


def saves(folder: str) -> dict[str, Any]:
    """Trains without a save, then with saves of every kind after its third step."""
    straight = Training()
    straight.epochs(2)
    training = Training()
    moment: dict[str, Any] = {}

    def save() -> None:
        training.accelerator.save_state(f"{folder}/plain")
        training.accelerator.save_state(f"{folder}/pickled", safe_serialization=False)
        training.accelerator.save_state(f"{folder}/background", blocking=False)
        moment.update(training.state())
        export(training, folder)

    training.epochs(2, at={3: save})
    training.accelerator.wait_for_checkpoint()
    return {"straight": straight.numbers(), "saved": training.numbers(), "moment": moment}


def export(training: Training, folder: str) -> None:
    """Writes what `save_state` does not."""
    accelerator, model = training.accelerator, training.model
    accelerator.save_model(model, f"{folder}/model", max_shard_size="0.3KB")
    accelerator.save_model(model, f"{folder}/model_pickled", safe_serialization=False)
    accelerator.save(accelerator.get_state_dict(model), f"{folder}/state.pt")
    accelerator.save(accelerator.get_state_dict(model), f"{folder}/state.safetensors", safe_serialization=True)
    accelerator.save({"one": [training.custom.mean], "two": training.custom.mean, "three": 3}, f"{folder}/nest.pt")


def resumes(folder: str, kind: str) -> Any:
    """Goes on from a save, in a process where nothing of the beginning is the same."""
    training = Training(seed=5)
    training.accelerator.load_state(f"{folder}/{kind}")
    training.epochs(2)
    return training.numbers()


def on_this_device(folder: str, into: str) -> Any:
    """What a load gives, what is written then, and what the helpers for single files read."""
    training = Training(seed=6)
    training.accelerator.load_state(folder, map_location="on_device")
    found = training.state()
    training.accelerator.save_state(into)
    return found, training.accelerator.device.type


def reads(folder: str) -> Any:
    """The files of `export`, read to the device in all the ways there are."""
    training = Training(seed=7)
    inner = training.accelerator.unwrap_model(training.model)
    load_checkpoint_in_model(inner, f"{folder}/model")
    from_shards = training.state()["weights"]
    other = Training(seed=8)
    state = load(f"{folder}/state.pt", map_location=other.accelerator.device)
    other.accelerator.unwrap_model(other.model).load_state_dict(state)
    first, *others = (id_tensor_storage(getattr(inner, name).weight) for name in ("first", "second", "third"))
    ties = find_tied_parameters(inner), [storage == first for storage in others]
    return from_shards, other.state()["weights"], *ties


def on_the_cpu(package: str, folder: str, into: str) -> Any:
    """Reads a folder on the CPU, and writes one; Accelerate must not see torch_xla, which it would compute through."""
    from accelerate.utils import imports

    imports._torch_xla_available = False
    imports.is_torch_xla_available.cache_clear()
    training = Training(package, seed=9, cpu=True)
    training.accelerator.load_state(folder)
    found = training.state()
    training.accelerator.save_state(into)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(folder: Path, launched_on_xla) -> dict[str, Any]:
    return launched_on_xla(saves, str(folder))[0]


@pytest.mark.parametrize("kind", ["plain", "background"])
def test_saving_changes_nothing_of_a_training_and_a_resumed_one_goes_on_bit_for_bit(
    saved, folder, launched_on_xla, kind
):
    assert saved["saved"] == saved["straight"]
    records, state = saved["straight"]
    assert launched_on_xla(resumes, str(folder), kind) == [(records[3:], state)]


def test_files_are_plain_tensors_of_the_cpu_with_weights_of_one_memory_once(saved, folder):
    from safetensors import safe_open

    written = [path for path in folder.rglob("*") if path.suffix in {".pkl", ".bin", ".pt"}]
    assert len(written) > 10
    for path in written:
        content = path.read_bytes().replace(b"xm_seed", b"")
        assert b"xla" not in content, path
        assert b"_rebuild_device" not in content, path  # as torch pickles tensors without a storage
    with safe_open(folder / "plain" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"first.weight", "third.weight"} < names
    assert "second.weight" not in names
    state = torch.load(folder / "pickled" / "pytorch_model.bin")
    assert state["first.weight"].data_ptr() == state["second.weight"].data_ptr() != state["third.weight"].data_ptr()
    assert state["short"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["plain", "pickled", "background"])
def test_a_save_on_xla_loads_on_the_cpu_and_under_accelerate(saved, folder, launched_on_xla, tmp_path, kind):
    for package in ("accelerate_nb", "accelerate"):
        into = str(tmp_path / package)
        assert run_on_ranks(on_the_cpu, 1, package, str(folder / kind), into) == [saved["moment"]]
        if kind == "plain":  # and back again
            back = launched_on_xla(on_this_device, into, str(tmp_path / "back"))
            assert back == [(saved["moment"], "xla")]


def test_files_for_other_uses_hold_the_same_weights(saved, folder, launched_on_xla):
    weights = saved["moment"]["weights"]
    ties = [["first.weight", "second.weight"]], [True, False]
    assert launched_on_xla(reads, str(folder)) == [(weights, weights, *ties)]
    assert len(list((folder / "model").glob("*.safetensors"))) > 2
    nest = torch.load(folder / "nest.pt")
    assert nest["one"][0].data_ptr() == nest["two"].data_ptr()
    assert nest["two"].tolist() == saved["moment"]["custom"]
    assert nest["three"] == 3
