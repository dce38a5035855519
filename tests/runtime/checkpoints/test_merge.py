"""Shards that real ranks wrote become one file, with the very numbers that Accelerate's own merge gives."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import merge_fsdp_weights as their_merge
from safetensors.torch import load_file
from torch import nn

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.checkpoints import shards as merging
from accelerate_nb.runtime.checkpoints.shards import merge, merge_fsdp_weights
from tests.ranks import run_on_ranks
from tests.runtime.checkpoints.test_damage import Evil, cut, noise, text


class Tied(nn.Module):
    """Odd sizes, a buffer, numbers of several types, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5))
        self.scale = nn.Parameter(torch.randn(5).bfloat16())
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight


def write_shards(folder: str) -> None:
    """A checkpoint as Accelerate's FSDP2 writes it: model and optimizer, each in shards of two ranks."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Tied()
    mesh = dist.init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights = get_model_state_dict(model)
    for name, saved in (
        ("pytorch_model_fsdp_0", {"model": weights}),
        ("optimizer_0", {"optimizer": get_optimizer_state_dict(model, optimizer)}),
        ("plain", weights),
        ("both", {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer), "step": 3}),
    ):
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(str(Path(folder, name))))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    run_on_ranks(write_shards, 2, str(folder))
    return folder


@pytest.fixture
def checkpoint(written, tmp_path) -> Path:
    """A checkpoint of one's own, as save_state leaves it."""
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        shutil.copytree(written / name, tmp_path / "checkpoint" / name)
    (tmp_path / "checkpoint" / "scheduler.bin").touch()
    return tmp_path / "checkpoint"


def same(ours, theirs) -> bool:
    if isinstance(theirs, torch.Tensor):
        bits = [item.contiguous().reshape(-1).view(torch.uint8) for item in (ours, theirs)]
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(*bits)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", "plain"])
@pytest.mark.parametrize("at_once", [1, 1 << 28])
def test_weights_are_bit_for_bit_those_of_accelerates_merge(written, tmp_path, monkeypatch, name, at_once):
    monkeypatch.setattr(merging, "_AT_ONCE", at_once)
    merge_fsdp_weights(written / name, tmp_path / "ours")
    their_merge(written / name, tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs"))
    assert len(theirs) == 12
    assert same(ours, theirs)
    Tied().load_state_dict(ours)


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", "optimizer_0", "both"])
def test_torchs_own_format_holds_what_accelerates_merge_gives(written, tmp_path, name):
    merge_fsdp_weights(written / name, tmp_path / "ours", safe_serialization=False)
    their_merge(written / name, tmp_path / "theirs", safe_serialization=False)
    ours, theirs = (torch.load(tmp_path / side / "pytorch_model.bin") for side in ("ours", "theirs"))
    assert same(ours, theirs)


def test_weights_are_found_among_what_else_was_saved_and_their_shards_in_a_whole_checkpoint(
    written, checkpoint, tmp_path
):
    merged = merge(written / "both", tmp_path)
    assert merged.left_out == ("optimizer", "step")
    Tied().load_state_dict(load_file(merged.path))
    merged = merge(checkpoint, tmp_path / "merged")
    assert merged.shards == checkpoint / "pytorch_model_fsdp_0"
    assert (merged.tensors, merged.path) == (12, tmp_path / "merged" / "model.safetensors")
    assert sum(tensor.nbytes for tensor in load_file(merged.path).values()) == merged.bytes


@pytest.mark.parametrize("safe", [True, False])
def test_shards_are_removed_after_the_file_was_compared(checkpoint, tmp_path, safe):
    compared = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "_compare", lambda name, *_: compared.append(name))
        merge(checkpoint, tmp_path, safe=safe, removes=True)
    assert len(compared) == 12
    assert not (checkpoint / "pytorch_model_fsdp_0").exists()
    assert (checkpoint / "scheduler.bin").exists()
    assert (checkpoint / "optimizer_0").exists()


def test_shards_stay_where_the_file_reads_otherwise(checkpoint, tmp_path, monkeypatch):
    right = merging.writer.write_numbers
    monkeypatch.setattr(merging.writer, "write_numbers", lambda tensor, file: right(tensor + 1, file))
    with pytest.raises(CheckpointError, match="reads otherwise than it was written"):
        merge(checkpoint, tmp_path, removes=True)
    assert (checkpoint / "pytorch_model_fsdp_0" / ".metadata").exists()
    assert not (tmp_path / "model.safetensors").exists()


def test_what_else_is_in_the_folder_of_shards_is_kept(checkpoint):
    folder = checkpoint / "pytorch_model_fsdp_0"
    (folder / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match=r"stays, since other files are in it: model.safetensors, notes.txt"):
        merge(folder, folder, removes=True)
    assert sorted(os.listdir(folder)) == ["model.safetensors", "notes.txt"]
    Tied().load_state_dict(load_file(folder / "model.safetensors"))


def test_a_file_that_is_there_is_replaced_only_where_that_is_requested(checkpoint, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_text("mine")
    with pytest.raises(ConfigurationError, match="is there already"):
        merge(checkpoint, tmp_path, replaces=False)
    assert file.read_text() == "mine"
    merge(checkpoint, tmp_path)
    assert len(load_file(file)) == 12


def test_what_goes_wrong_in_writing_leaves_the_former_file(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_text("mine")

    def full(tensor, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging.writer, "write_numbers", full)
    with pytest.raises(CheckpointError, match=r"model\.safetensors could not be written .*No space left"):
        merge(checkpoint, tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "model.safetensors"]


def test_too_little_space_is_reported_before_anything_is_written(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(CheckpointError, match=r"has 0\.00 GB left"):
        merge(checkpoint, tmp_path / "merged")
    assert not list((tmp_path / "merged").iterdir())


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (Path.unlink, ".metadata", "the save has not come to its end"),
        (Path.unlink, "__1_0.distcp", r"not beside it: __1_0\.distcp"),
        (cut, "__1_0.distcp", r"end too early: __1_0\.distcp"),
        (noise, "__1_0.distcp", "damaged shards"),
        (text, ".metadata", "but is damaged"),
        (lambda path: path.write_bytes(pickle.dumps({})), ".metadata", "holds something else"),
    ],
)
def test_damage_is_reported(checkpoint, tmp_path, damage, file, message):
    damage(checkpoint / "pytorch_model_fsdp_0" / file)
    with pytest.raises((CheckpointError, ConfigurationError), match=message):
        merge(checkpoint / "pytorch_model_fsdp_0", tmp_path, removes=True)
    assert not (tmp_path / "model.safetensors").exists()
    assert (checkpoint / "pytorch_model_fsdp_0" / "__0_0.distcp").exists()


def test_neither_a_list_of_shards_nor_a_shard_runs_code(checkpoint, tmp_path):
    (checkpoint / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "proof")))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir, which is not data"):
        merge(checkpoint, tmp_path)
    saved = {"a": Evil(tmp_path / "proof"), "b": torch.ones(2)}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path / "evil_shards"), no_dist=True)
    with pytest.raises(CheckpointError, match="could run code"):
        merge(tmp_path / "evil_shards", tmp_path, safe=False)
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "It holds nothing"),
        (["model.safetensors"], "need no merging"),
        (["pytorch_model_fsdp_rank0.bin"], "LOCAL_STATE_DICT"),
        (["optimizer_0/.metadata"], "Its folders optimizer_0 do"),
    ],
)
def test_a_folder_without_shards_reports_what_it_holds(tmp_path, files, message):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ConfigurationError, match=message):
        merging.find(tmp_path)


def test_a_path_that_can_not_be_meant_is_refused(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "two")
    shutil.copytree(checkpoint / "pytorch_model_fsdp_0", tmp_path / "two" / "pytorch_model_fsdp_1")
    for source, target, message in (
        (tmp_path / "none", tmp_path, "but is not there"),
        (checkpoint, tmp_path / "model.safetensors", "should be a folder"),
        (tmp_path / "two", tmp_path, "several models: pytorch_model_fsdp_0, pytorch_model_fsdp_1"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            merge(source, target)


def test_what_safetensors_cannot_hold_is_named(tmp_path):
    dcp.save({"a": torch.ones(2), "b": "text"}, storage_writer=dcp.FileSystemWriter(tmp_path / "it"), no_dist=True)
    with pytest.raises(CheckpointError, match="what is no tensor under 'b'"):
        merge(tmp_path / "it", tmp_path)
    merge(tmp_path / "it", tmp_path, safe=False)
    assert torch.load(tmp_path / "pytorch_model.bin")["b"] == "text"
