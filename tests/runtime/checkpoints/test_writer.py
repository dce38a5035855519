"""Weights and states are written by blocks in the files that others read, with their sums, and never beside older ones."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import load_checkpoint_in_model
from safetensors.torch import load_file
from torch import nn

from accelerate_nb import Accelerator
from accelerate_nb.errors import StateError
from accelerate_nb.runtime.checkpoints.load_file import with_aliases
from accelerate_nb.runtime.checkpoints.manifest import entry_of
from accelerate_nb.runtime.checkpoints.writer import (
    BLOCK,
    DirectWriter,
    DiskFile,
    FileToWrite,
    without_aliases,
    write_files,
)
from tests.big_models.models import Tied
from tests.runtime.checkpoints.test_kills import fill, value_of

SIZES = (1, 8, 4095, 4096, (1 << 20) + 3, BLOCK, BLOCK + 5, 2 * BLOCK - 1)


def test_a_file_of_any_length_is_written_as_given(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        for size in SIZES:
            content = random.Random(size).randbytes(size)
            file = DiskFile(tmp_path / "file", size, DirectWriter(3, pool))
            file.write(content[: size // 3])
            file.write(memoryview(content)[size // 3 :])
            entry = file.finish()
            assert (tmp_path / "file").read_bytes() == content
            assert entry_of(tmp_path / "file") == entry
            assert entry.bytes == size
        # a full disk is reported at the end
        file = DiskFile(Path("/dev/full"), 0, DirectWriter(1, pool))
        file.write(bytes(2 * BLOCK))
        with pytest.raises(OSError, match="No space left on device"):
            file.finish()


def test_safetensors_of_every_kind_are_read_by_their_library(tmp_path: Path) -> None:
    floats = torch.float64, torch.float32, torch.float16, torch.bfloat16
    dtypes: Any = (*floats, torch.int64, torch.int8, torch.bool)
    tensors = {f"{dtype}": torch.arange(15).reshape(3, 5).to(dtype) for dtype in dtypes}
    tensors |= {"one": torch.tensor(2.5), "none": torch.zeros(0, 3), "turned": torch.randn(4, 6).t()}
    tensors |= {"complex": torch.randn(3, dtype=torch.complex64), "large": torch.randn(1200, 1000)}
    written = write_files([FileToWrite("model.safetensors", tensors, safe=True)], tmp_path, threads=2)
    assert written == {"model.safetensors": entry_of(tmp_path / "model.safetensors")}
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), tensors, rtol=0, atol=0)


def test_what_torch_writes_by_blocks_is_what_it_reads(tmp_path: Path) -> None:
    state = {"state": {0: {"step": torch.tensor(3.0), "moment": torch.randn(2_500_000)}}, "groups": [{"lr": 0.1}]}
    write_files([FileToWrite("optimizer.bin", state)], tmp_path)
    torch.testing.assert_close(torch.load(tmp_path / "optimizer.bin", weights_only=True), state, rtol=0, atol=0)


def filled(value: float) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    fill(model, value)
    return model


def test_new_weights_replace_old_ones_of_every_other_kind(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    (tmp_path / "config.json").write_text("{}")
    kinds: list[tuple[str, bool]] = [("10GB", True), ("20KB", True), ("10GB", False), ("20KB", False)]
    # each kind comes after each other one
    for value, index in enumerate((0, 1, 2, 3, 0, 2, 0, 3, 1, 3, 2, 1, 0)):
        size, safe = kinds[index]
        accelerator.save_model(filled(float(value)), tmp_path, max_shard_size=size, safe_serialization=safe)
        model = filled(-1.0)
        load_checkpoint_in_model(model, str(tmp_path))
        assert value_of(model) == value
    assert (tmp_path / "config.json").exists()


@pytest.mark.parametrize("dispatcher", ["accelerate", "accelerate_nb"])
@pytest.mark.parametrize(
    "device_map", [{"0": "cpu", "1": "disk", "2": "disk", "3": "cpu"}, {"": "disk"}], ids=["both", "disk"]
)
def test_a_model_whose_weights_are_offloaded_is_saved_whole(tmp_path: Path, dispatcher: str, device_map: Any) -> None:
    if dispatcher == "accelerate" and "" in device_map:
        pytest.skip("Accelerate writes nothing for the empty name")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    import_module(dispatcher).dispatch_model(model, device_map, offload_dir=tmp_path / "offloaded", main_device="cpu")
    assert any(parameter.is_meta for parameter in model.parameters())
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path / "model")
    accelerator.bundle.models.append(model)
    accelerator.save_state(tmp_path / "state")
    for folder in ("model", "state"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert saved.keys() == wanted.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in wanted.items())
    assert any(parameter.is_meta for parameter in model.parameters())
    accelerator.end_training()


def test_weights_that_are_nowhere_are_not_saved_and_those_left_out_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(StateError, match=r"on the meta device, and no hook has them: weight, bias"):
        Accelerator(cpu=True).save_model(model, tmp_path)
    Accelerator(cpu=True).save_model(Tied(), tmp_path)
    (record,) = caplog.records
    assert record.getMessage().startswith("Removed shared tensor {'head.weight'} while")


def test_shards_have_an_index_of_every_tensor(tmp_path: Path) -> None:
    model = filled(1.0)
    Accelerator(cpu=True).save_model(model, tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    assert set(index["weight_map"].values()) == {f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)}
    assert index["metadata"]["total_size"] == sum(4 * parameter.numel() for parameter in model.parameters())


def test_a_memory_with_two_names_is_written_once_and_found_under_both_and_views_of_one_are_both_written() -> None:
    model = Tied()
    kept = without_aliases(model.state_dict())
    assert list(kept) == ["embed.weight", *(f"inner.{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias"))]
    model.load_state_dict(with_aliases({f"module.{name}": kept[name] for name in kept}, model.state_dict()))
    both = torch.arange(4.0)
    kept = without_aliases({"low": both[:2], "high": both[2:]})
    assert {name: tensor.tolist() for name, tensor in kept.items()} == {"low": [0.0, 1.0], "high": [2.0, 3.0]}
