"""`accelerate-nb merge-weights` does what Accelerate's command of that name does, under its flags."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from accelerate_nb.cli.main import main

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2, dtype=torch.bfloat16)}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint" / "pytorch_model_fsdp_0"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": WEIGHTS}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder.parent


def test_the_file_is_written_and_named(checkpoint, tmp_path, capsys):
    assert main(["merge-weights", str(checkpoint), str(tmp_path / "new" / "merged")]) == 0
    file = tmp_path / "new" / "merged" / "model.safetensors"
    torch.testing.assert_close(load_file(file), WEIGHTS, rtol=0, atol=0)
    assert f"{file}: 2 tensors" in capsys.readouterr().out
    assert checkpoint.joinpath("pytorch_model_fsdp_0").exists()


@pytest.mark.parametrize("unsafe", ["--unsafe", "--unsafe_serialization"])
@pytest.mark.parametrize("remove", ["--remove", "--remove_checkpoint_dir"])
def test_the_flags_are_accelerates_too(checkpoint, tmp_path, unsafe, remove):
    assert main(["merge-weights", str(checkpoint), str(tmp_path), unsafe, remove]) == 0
    torch.testing.assert_close(torch.load(tmp_path / "pytorch_model.bin"), WEIGHTS, rtol=0, atol=0)
    assert not checkpoint.joinpath("pytorch_model_fsdp_0").exists()


def test_a_file_that_is_there_is_kept_unless_it_is_to_be_replaced(checkpoint, tmp_path, capsys):
    (tmp_path / "model.safetensors").write_text("mine")
    assert main(["merge-weights", str(checkpoint), str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_text() == "mine"
    assert main(["merge-weights", str(checkpoint), str(tmp_path), "--overwrite"]) == 0
    assert len(load_file(tmp_path / "model.safetensors")) == 2


def test_what_is_no_checkpoint_is_reported_in_one_line(tmp_path, capsys):
    assert main(["merge-weights", str(tmp_path), str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("accelerate-nb: ")
    assert "should hold .metadata" in error
    assert error.count("\n") == 1
