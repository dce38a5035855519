"""`accelerate-nb estimate-memory` tells every figure, and whether it fits."""

import json

import pytest
import torch
from safetensors.torch import save_file

from accelerate_nb.cli.main import main

LINEAR = ["estimate-memory", "torch.nn:Linear", "--args", '{"in_features": 1024, "out_features": 1024, "bias": false}']
MIB = 1 << 20


def estimate(capsys, *words):
    assert main([*LINEAR, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_figures_are_in_bytes_under_stable_keys(capsys):
    facts = estimate(capsys, "-n", "2", "--memory", "1GiB")
    assert (facts["parameters"], facts["buffers"], facts["num_processes"]) == (MIB, 0, 2)
    assert facts["device_memory"] == 1 << 30
    totals = {"float32": 4 * MIB, "float16": 2 * MIB, "bfloat16": 2 * MIB, "int8": MIB, "int4": MIB // 2}
    assert {fact["dtype"]: fact["total"] for fact in facts["inference"]} == totals
    assert facts["training"][0] == {
        "degrees": {},
        "precision": "float32",
        "stages": [
            {"weights": 4 * MIB, "gradients": 4 * MIB, "optimizer": 8 * MIB + 4, "extra": 0, "total": 16 * MIB + 4}
        ],
    }
    meshes = [({}, 4 * MIB), ({"dp_replicate": 2}, 4 * MIB), ({"dp_shard": 2}, 2 * MIB)]
    found = [(fact["degrees"], fact["stages"][0]["gradients"]) for fact in facts["training"]]
    assert found[::3] == meshes


def test_the_text_shows_what_fits_and_what_is_not_counted(capsys):
    assert main([*LINEAR, "-n", "2", "--memory", "15MiB", "--optimizer", "adam"]) == 0
    text = capsys.readouterr().out
    lines = {line.strip().split("  ")[0]: line for line in text.splitlines()}
    assert "1,048,576 parameters" in text
    assert lines["float16"].split("  ")[2:] != []
    assert "Activations are not counted" in text
    assert "16.0 MiB  too much" in lines["one rank, float32"]
    assert "8.0 MiB  fits" in lines["one rank, bfloat16"]
    assert "dp_replicate 2 (DDP), mixed" in lines


def test_one_rank_has_nothing_to_share_and_accelerates_flag_chooses_types(capsys):
    facts = estimate(capsys, "-n", "1", "--library_name", "timm", "--dtypes", "int8", "float32")
    assert [fact["degrees"] for fact in facts["training"]] == [{}, {}, {}]
    assert [fact["dtype"] for fact in facts["inference"]] == ["int8", "float32"]


def test_a_file_is_estimated(tmp_path, capsys):
    save_file({"a": torch.zeros(10, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert main(["estimate-memory", str(tmp_path / "model.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--args", "{hidden: 1}"], "should be JSON"),
        (["--args", "[1]"], "by their names"),
        (["-n", "0"], "should be a whole number, at least 1"),
        (["--mesh", "dp_shrd=2"], "There is no key 'dp_shrd'. Did you mean dp_shard?"),
        (["--mesh", "dp_shard=two"], "is 'two', but should be a whole number, at least 1"),
        (["--mesh", "dp_shard=2", "-n", "3"], "make 2 ranks, but there are 3"),
        (["--mesh", "tp=2"], "has no plan by which tp would split it"),
        (["--memory", "much"], "'much' is not a size"),
        (["--optimizer", "lion"], "invalid choice: 'lion'"),
        (["--dtypes", "float8"], "float8"),
    ],
)
def test_a_wrong_word_is_reported(capsys, words, message):
    assert main([*LINEAR, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("train.py:Net", "import os\nos.environ['NOWHERE']", "KeyError: 'NOWHERE'"),
        ("train.py:Net", "import no_such_module", "No module named 'no_such_module'"),
        ("train.py:Net", "def f(:", "SyntaxError: invalid syntax"),
        ("train.py:Net", "import sys\nsys.exit(3)", "SystemExit: 3"),
        ("no_such_package.models:Net", "", "No module named 'no_such_package'"),
        ("none.py:Net", "", "No such file or directory"),
        ("torch.nn:Linear", "", "missing 2 required positional arguments: 'in_features' and 'out_features'"),
    ],
)
def test_a_model_that_can_not_be_made_is_reported_in_one_line(tmp_path, capsys, model, code, message):
    (tmp_path / "train.py").write_text(code)
    assert main(["estimate-memory", model]) == 2
    error = capsys.readouterr().err
    assert f"{model} was to be built, and that failed" in error
    assert message in error
    assert not code or f"train.py, line {code.count(chr(10)) + 1})" in error
    assert error.count("\n") == 1


def test_a_mesh_is_estimated_rank_by_rank_and_the_smallest_is_proposed(capsys):
    facts = estimate(capsys, "--mesh", "dp_shard=4", "--memory", "12MiB")
    assert (facts["num_processes"], facts["training"][3]["degrees"]) == (4, {"dp_shard": 4})
    assert facts["training"][3]["stages"][0]["weights"] == MIB
    smallest = facts["smallest_mesh"]
    assert smallest["degrees"] == {"dp_shard": 4}
    assert smallest["stages"][0]["total"] <= 0.8 * 12 * MIB
    assert main([*LINEAR, "--mesh", "dp_shard=4", "--memory", "12MiB"]) == 0
    text = capsys.readouterr().out
    assert "The smallest mesh is dp_shard 4 (FSDP) in mixed precision: 8.0 MiB a rank" in text
    assert main([*LINEAR, "--memory", "1GiB"]) == 0
    assert "One rank is enough" in capsys.readouterr().out
