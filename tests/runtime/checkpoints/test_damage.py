"""A damaged or foreign file is named with what was expected of it, and no file's code is run."""

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_nb import Accelerator
from accelerate_nb.errors import CheckpointError
from tests.ranks import run_on_ranks
from tests.runtime.checkpoints.test_checkpoint import Counter
from tests.runtime.checkpoints.test_kills import fill


class Evil:
    """What runs code when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def noise(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def text(path: Path) -> None:
    path.write_text("Once upon a time there was a file that nobody could load." * 40)


def code(path: Path) -> None:
    with path.open("wb") as file:
        pickle.dump({"state": Evil(path.parent.parent / "proof")}, file, protocol=2)


def torch_code(path: Path) -> None:
    torch.save({"state": Evil(path.parent.parent / "proof")}, path)


def list_of_nothing(path: Path) -> None:
    torch.save([1, 2, 3], path)


def training() -> Accelerator:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    accelerator.prepare(model, optimizer, schedule, torch.utils.data.DataLoader(range(4)))
    accelerator.register_for_checkpointing(Counter())
    return accelerator


FILES = {
    "model.safetensors": "the weights of model 0",
    "optimizer.bin": "the state of optimizer 0",
    "scheduler.bin": "the state of scheduler 0",
    "scaler.pt": "the state of the gradient scaler",
    "custom_checkpoint_0.pkl": "the state of registered object 0",
    "random_states_0.pkl": "the random states of a process",
    "positions_0.pkl": "the positions of the loaders",
}
DAMAGES: list[Callable[[Path], None]] = [cut, empty, noise, text, code, torch_code, list_of_nothing]


def test_each_kind_of_damage_to_each_file_is_named_with_what_was_expected(tmp_path: Path) -> None:
    accelerator = training()
    folder = tmp_path / "saved"
    accelerator.save_state(folder)
    (folder / "checkpoint.json").unlink()  # as in a folder that Accelerate wrote: the files speak for themselves
    for name, expected in FILES.items():
        whole = (folder / name).read_bytes()
        for damage in DAMAGES:
            if (name, damage) == ("positions_0.pkl", list_of_nothing):
                continue  # a list of another length is told to be that
            damage(folder / name)
            with pytest.raises(CheckpointError) as failure:
                accelerator.load_state(folder)
            assert str(folder / name) in str(failure.value), damage
            assert expected in str(failure.value) or "would run code" in str(failure.value), damage
            assert not (tmp_path / "proof").exists()
        (folder / name).write_bytes(whole)
    accelerator.load_state(folder)
    accelerator.end_training()


@pytest.mark.parametrize("name", [*FILES, "checkpoint.json"])
def test_one_changed_byte_is_found(tmp_path: Path, name: str) -> None:
    accelerator = training()
    folder = tmp_path / "saved"
    accelerator.save_state(folder)
    flip(folder / name)
    with pytest.raises(CheckpointError, match=name):
        accelerator.load_state(folder)
    accelerator.end_training()


def test_damage_to_a_large_file_is_found_where_it_was_summed(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(3000, 2000, bias=False))  # 24 MB: the first 16 MiB, and the one after them
    path = accelerator.save_state(tmp_path / "saved") / "model.safetensors"
    for offset in (15 << 20, (16 << 20) + 5):
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is damaged: its content"):
            accelerator.load_state(tmp_path / "saved")
        content[offset] ^= 1
        path.write_bytes(content)
    accelerator.load_state(tmp_path / "saved")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="bytes were expected"):
        accelerator.load_state(tmp_path / "saved")
    accelerator.end_training()


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    accelerator = training()
    accelerator.save_state(tmp_path / "saved")
    (tmp_path / "saved" / "optimizer.bin").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.bin is missing: \d+ bytes were expected"):
        accelerator.load_state(tmp_path / "saved")
    (tmp_path / "saved" / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.bin does not exist, and the state of optimizer 0"):
        accelerator.load_state(tmp_path / "saved")
    accelerator.end_training()


def test_weights_that_save_model_replaced_are_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path)
    saved_at = (tmp_path / "checkpoint.json").stat().st_mtime_ns
    for value, safe in ((1.0, True), (2.0, False)):
        fill(model, value)
        accelerator.save_model(model, tmp_path, safe_serialization=safe)
        fill(model, 0.0)
        accelerator.load_state(tmp_path)
        assert model.weight[0, 0] == value
    assert (tmp_path / "checkpoint.json").stat().st_mtime_ns == saved_at
    flip(tmp_path / "random_states_0.pkl")
    with pytest.raises(CheckpointError, match="random_states_0"):
        accelerator.load_state(tmp_path)
    accelerator.end_training()


def test_a_file_of_a_hook_may_change_but_not_be_missing(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.register_save_state_pre_hook(lambda _, __, folder: Path(folder, "notes.txt").write_text("first"))
    notes = accelerator.save_state(tmp_path / "saved") / "notes.txt"
    for content in ("other", "longer than it was"):
        notes.write_text(content)
        accelerator.load_state(tmp_path / "saved")
        assert accelerator.resume(tmp_path / "saved")
    notes.unlink()
    with pytest.raises(CheckpointError, match=r"notes\.txt is missing"):
        accelerator.load_state(tmp_path / "saved")
    accelerator.end_training()


class Thing:
    """A class of one's own in a registered object's state."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_a_registered_object_may_keep_what_is_not_plain_where_its_folder_is_trusted(tmp_path: Path) -> None:
    accelerator, keeper = Accelerator(cpu=True), Counter()
    accelerator.register_for_checkpointing(keeper)
    keeper.count = Thing(3)
    accelerator.save_state(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"refers to .*Thing.*weights_only"):
        accelerator.load_state(tmp_path / "saved")
    keeper.count = Thing(0)
    with torch.serialization.safe_globals([Thing]):
        accelerator.load_state(tmp_path / "saved")
    assert keeper.count.value == 3
    keeper.count = Thing(0)
    accelerator.load_state(tmp_path / "saved", load_kwargs={"weights_only": False})
    assert keeper.count.value == 3
    accelerator.end_training()


def loads_another_model(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match=r"(?s)model\.safetensors does not fit.*size mismatch"):
        accelerator.load_state(folder)


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(4, 4))
    accelerator.save_state(tmp_path / "saved")
    accelerator.end_training()
    run_on_ranks(loads_another_model, 2, str(tmp_path / "saved"))
