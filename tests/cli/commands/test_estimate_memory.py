"""`accelerate-nb estimate-memory` tells every figure, and whether it fits."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from accelerate_nb import notebook_launcher
from accelerate_nb.cli.main import main
from accelerate_nb.cli.terminal.estimate_tables import size

LINEAR = ["estimate-memory", "torch.nn:Linear", "--args", '{"in_features": 1024, "out_features": 1024, "bias": false}']
MIB = 1 << 20


def estimate(capsys, *words):
    assert main([*LINEAR, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_figures_are_in_bytes_under_stable_keys(capsys):
    facts = estimate(capsys, "-n", "2", "--memory", "1GiB")
    assert (facts["parameters"], facts["buffers"], facts["num_processes"]) == (MIB, 0, 2)
    assert facts["device_memory"] == 1 << 30
    assert {fact["dtype"]: fact["total"] for fact in facts["inference"]} == {
        "float32": 4 * MIB,
        "float16": 2 * MIB,
        "bfloat16": 2 * MIB,
        "int8": MIB,
        "int4": MIB // 2,
    }
    plain = facts["training"][0]
    assert plain["precision"] == "float32"
    assert plain["alone"] == {
        "weights": 4 * MIB,
        "gradients": 4 * MIB,
        "optimizer": 8 * MIB + 4,
        "extra": 0,
        "total": 16 * MIB + 4,
    }
    assert plain["ranks"]["zero-2"]["gradients"] == 2 * MIB


def test_the_text_shows_what_fits_and_what_is_not_counted(capsys):
    assert main([*LINEAR, "-n", "2", "--memory", "15MiB", "--optimizer", "adam"]) == 0
    text = capsys.readouterr().out
    lines = {line.strip().split("  ")[0]: line for line in text.splitlines()}
    assert "1,048,576 parameters" in text
    assert lines["float16"].split("  ")[2:] != []
    assert "Activations are not counted" in text
    assert "on each of 2 ranks, mixed" in text
    alone = text.split("on one rank")[1].split("on each of")[0]
    assert "16.00 MiB  too much" in alone
    assert "8.00 MiB  fits" in alone


def test_one_rank_has_nothing_to_share(capsys):
    assert main([*LINEAR, "-n", "1"]) == 0
    assert "ZeRO" not in capsys.readouterr().out


def test_accelerates_flag_chooses_types(capsys):
    assert [item["dtype"] for item in estimate(capsys, "--dtypes", "int8", "float32")["inference"]] == [
        "int8",
        "float32",
    ]


def test_a_file_is_estimated(tmp_path, capsys):
    save_file({"a": torch.zeros(10, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert main(["estimate-memory", str(tmp_path / "model.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--args", "{hidden: 1}"], "should be JSON"),
        (["--args", "[1]"], "by their names"),
        (["-n", "0"], "should be at least 1"),
        (["--mesh", "dp_shrd=2"], "Did you mean dp_shard?"),
        (["--mesh", "dp_shard=two"], "'dp_shard=two' is no degree"),
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
    ("code", "message"),
    [
        ("import os\nos.environ['NOWHERE']", "KeyError: 'NOWHERE'"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
    ],
)
def test_code_that_fails_is_reported_in_one_line(tmp_path, capsys, code, message):
    (tmp_path / "train.py").write_text(code)
    assert main(["estimate-memory", f"{tmp_path}/train.py:Net"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"train.py, line {code.count(chr(10)) + 1})" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.50 KiB"), (1 << 40, "1.00 TiB"), (1 << 52, "4096.00 TiB")],
)
def test_sizes_are_written_as_people_write_them(number, text):
    assert size(number) == text


def test_a_mesh_is_estimated_rank_by_rank_and_the_smallest_is_proposed(capsys):
    facts = estimate(capsys, "--mesh", "dp_shard=4", "--memory", "12MiB")
    assert (facts["num_processes"], facts["mesh"]["degrees"]) == (4, {"dp_shard": 4})
    assert facts["mesh"]["training"][0]["stages"][0]["weights"] == MIB
    smallest = facts["smallest_mesh"]
    assert smallest["degrees"] == {"dp_shard": 4}
    assert smallest["stages"][0]["total"] <= 0.8 * 12 * MIB
    assert main([*LINEAR, "--mesh", "dp_shard=4", "--memory", "12MiB"]) == 0
    text = capsys.readouterr().out
    assert "on each rank of dp_shard 4 (4 ranks)" in text
    assert "The smallest mesh is dp_shard 4 (4 ranks) in mixed precision: 8.00 MiB a rank" in text
    assert main([*LINEAR, "--memory", "1GiB"]) == 0
    assert "One rank is enough" in capsys.readouterr().out


def train() -> None:
    from accelerate_nb import Accelerator

    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model = torch.nn.Linear(1024, 1024, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 1024)).sum())
    optimizer.step()


def test_what_a_run_held_stands_beside_the_estimate(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_NB_FOLDER", str(tmp_path))
    notebook_launcher(train, num_processes=2, cpu=True)
    capsys.readouterr()
    facts = estimate(capsys, "--mesh", "dp_shard=2", "--run", "last")
    expected = facts["mesh"]["training"][0]["stages"][0]
    for rank, measured in enumerate(facts["measured"]["ranks"]):
        assert measured["rank"] == rank
        assert all(measured[name] == expected[name] for name in ("weights", "gradients", "optimizer"))
    assert main([*LINEAR, "--mesh", "dp_shard=2", "--run", "last"]) == 0
    assert "rank 1   2.00 MiB   2.00 MiB    4.00 MiB" in capsys.readouterr().out
    notebook_launcher(print, num_processes=1, cpu=True)
    assert main([*LINEAR, "--run", "last"]) == 2
    assert "none of its ranks made a step" in capsys.readouterr().err
