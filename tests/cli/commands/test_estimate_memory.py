"""`accelerate-nb estimate-memory` tells every figure, and whether it fits."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from accelerate_nb.cli.commands.estimate_memory import size
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


def test_the_text_says_what_fits_and_what_is_not_counted(capsys):
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
        (["--memory", "much"], "'much' is not a size"),
        (["--optimizer", "lion"], "invalid choice: 'lion'"),
        (["--dtypes", "float8"], "float8"),
    ],
)
def test_a_wrong_word_is_told(capsys, words, message):
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
def test_code_that_fails_is_told_in_one_line(tmp_path, capsys, code, message):
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
def test_sizes_are_said_as_people_say_them(number, text):
    assert size(number) == text
