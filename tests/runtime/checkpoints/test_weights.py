"""A model's weights are written in the files that others read, and never beside older ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints.weights import parse_size, split, with_aliases, without_aliases


class Tied(nn.Module):
    """A model one of whose weights has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight


def filled(value: float) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def reads_with_accelerate(folder: Path) -> float:
    from accelerate import load_checkpoint_in_model

    model = filled(0.0)
    load_checkpoint_in_model(model, str(folder))
    values = {parameter.mean().item() for parameter in model.parameters()}
    assert len(values) == 1
    return values.pop()


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["10GB", "20KB"])
def test_accelerate_reads_what_is_saved(tmp_path: Path, safe: bool, size: str) -> None:
    Accelerator(cpu=True).save_model(filled(3.0), tmp_path, max_shard_size=size, safe_serialization=safe)
    assert reads_with_accelerate(tmp_path) == 3.0


@pytest.mark.parametrize("before", [("10GB", True), ("20KB", True), ("10GB", False), ("20KB", False)])
@pytest.mark.parametrize("after", [("10GB", True), ("20KB", True), ("10GB", False), ("20KB", False)])
def test_new_weights_replace_old_ones(tmp_path: Path, before: tuple[str, bool], after: tuple[str, bool]) -> None:
    accelerator = Accelerator(cpu=True)
    (tmp_path / "config.json").write_text("{}")
    for value, (size, safe) in ((1.0, before), (2.0, after)):
        accelerator.save_model(filled(value), tmp_path, max_shard_size=size, safe_serialization=safe)
    assert reads_with_accelerate(tmp_path) == 2.0
    assert (tmp_path / "config.json").exists()


def test_shards_have_an_index_of_every_tensor(tmp_path: Path) -> None:
    model = filled(1.0)
    Accelerator(cpu=True).save_model(model, tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    assert set(index["weight_map"].values()) == {f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)}
    assert index["metadata"]["total_size"] == sum(4 * parameter.numel() for parameter in model.parameters())


def test_a_memory_with_two_names_is_written_once_and_found_under_both() -> None:
    model = Tied()
    kept = without_aliases(model.state_dict())
    assert list(kept) == ["first.weight"]
    restored = with_aliases({"module.first.weight": kept["first.weight"]}, model.state_dict())
    assert set(restored) == {"first.weight", "second.weight"}
    model.load_state_dict(restored)


def test_views_of_one_memory_are_both_written() -> None:
    both = torch.arange(4.0)
    kept = without_aliases({"low": both[:2], "high": both[2:]})
    assert {name: tensor.tolist() for name, tensor in kept.items()} == {"low": [0.0, 1.0], "high": [2.0, 3.0]}


def test_tensors_are_grouped_in_their_order() -> None:
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in zip("abcd", (4, 4, 30, 2), strict=True)}
    assert [list(shard) for shard in split(tensors, 10)] == [["a", "b"], ["c"], ["d"]]


def test_sizes_are_read_with_their_units() -> None:
    assert [parse_size(size) for size in (7, "5GB", "20 kb", "1GiB")] == [7, 5 * 10**9, 2_500, 2**30]
    with pytest.raises(ConfigurationError, match="'five' is not a size"):
        parse_size("five")
