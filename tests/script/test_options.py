"""A script's options: every spelling, every type, and a clear word for what is none."""

import sys
from pathlib import Path

import pytest

from accelerate_nb.script.options import OptionValues, parameters

OPTIONS = {
    "rate": ("float", "1e-3", "learning rate"),
    "batch_size": ("int", "8", "100% of a batch"),
    "fast_mode": ("bool", "False", ""),
    "name": ("str", "'a'", ""),
    "folder": ("Path", "Path('x')", ""),
    "sizes": ("list[int]", "[]", ""),
    "shape": ("tuple[float, ...]", "()", ""),
    "seed": ("int | None", "None", ""),
    "kind": ("Literal['adam', 'sgd']", "'adam'", ""),
    "flags": ("list[bool] | None", "None", ""),
    "filter_": ("str", "''", ""),
    "print_": ("bool", "True", ""),
    "_debug": ("bool", "True", ""),
}


@pytest.fixture(autouse=True)
def _no_script_words(monkeypatch):
    monkeypatch.setenv("ACCELERATE_NB_SCRIPT_WORDS", "[]")


def option_values(monkeypatch: pytest.MonkeyPatch, *words: str, name: str = "__main__") -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    options = parameters(name, "/home/train.py", "Train a model", **OPTIONS)
    assert isinstance(options, OptionValues)
    return {key: value for key, value in zip(OPTIONS, options.instead_of(*OPTIONS), strict=True) if value != key}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", {}),
        ("--rate 0.1", {"rate": 0.1}),
        ("--rate=-1e-3", {"rate": -1e-3}),
        ("--rate -1e-3", {"rate": -1e-3}),
        ("--rate -.5 --rate 2", {"rate": 2.0}),
        ("--batch-size 4", {"batch_size": 4}),
        ("--batch_size 1_000", {"batch_size": 1000}),
        ("--fast-mode", {"fast_mode": True}),
        ("--fast_mode", {"fast_mode": True}),
        ("--no-fast-mode", {"fast_mode": False}),
        ("--no-fast_mode", {"fast_mode": False}),
        ("--fast-mode --no-fast-mode", {"fast_mode": False}),
        ("--name=", {"name": ""}),
        ("--folder a/b", {"folder": Path("a/b")}),
        ("--sizes 1 -2 3 --name b", {"sizes": [1, -2, 3], "name": "b"}),
        ("--sizes", {"sizes": []}),
        ("--shape 1 2.5", {"shape": (1.0, 2.5)}),
        ("--seed 3", {"seed": 3}),
        ("--seed None", {"seed": None}),
        ("--kind sgd", {"kind": "sgd"}),
        ("--flags true no 1", {"flags": [True, False, True]}),
        ("--filter a_b", {"filter_": "a_b"}),
        ("--filter_=a_b", {"filter_": "a_b"}),
        ("--no-print_", {"print_": False}),
        ("--no_print_", {"print_": False}),
        ("--no-_debug", {"_debug": False}),
    ],
)
def test_options_have_their_types(monkeypatch, words, found):
    values = option_values(monkeypatch, *words.split())
    assert values == found
    assert {key: type(value) for key, value in values.items()} == {key: type(value) for key, value in found.items()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch-sise 3", "there is no option --batch-sise. Did you mean --batch-size?"),
        ("--no-fast-mod", "there is no option --no-fast-mod. Did you mean --no-fast-mode?"),
        ("--bat 3", "there is no option --bat"),
        ("other", "'other' was given, and belongs to no option"),
        ("--batch-size x", "--batch-size: 'x' was given, and it takes a whole number"),
        ("--rate fast", "--rate: 'fast' was given, and it takes a number"),
        ("--kind rmsprop", "'rmsprop' was given, and it takes one of adam, sgd"),
        ("--flags maybe", "'maybe' was given, and it takes true or false"),
        ("--rate", "--rate: expected one argument"),
    ],
)
def test_what_is_no_option_is_reported_and_ends_the_script(monkeypatch, capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        option_values(monkeypatch, *words.split())
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert output.err.startswith("train.py: ")


def test_help_lists_the_options_with_their_defaults(monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        option_values(monkeypatch, "--help")
    assert caught.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "usage: train.py" in output
    assert "Train a model" in output
    assert "--rate FLOAT learning rate (default: 1e-3)" in output
    assert "--batch-size INT 100% of a batch (default: 8)" in output
    assert "--kind {adam,sgd}" in output
    assert "--fast_mode" not in output


@pytest.mark.parametrize("words", ["--help", "--nothing"])
def test_one_of_many_processes_speaks(monkeypatch, capsys, words):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        option_values(monkeypatch, words)
    assert capsys.readouterr() == ("", "")


def test_what_imports_the_script_for_its_data_loaders_has_the_same_values(monkeypatch):
    assert option_values(monkeypatch, "--rate", "3") == {"rate": 3.0}
    # such a process has other words of its own
    assert option_values(monkeypatch, "--multiprocessing-fork", name="__mp_main__") == {"rate": 3.0}
    assert option_values(monkeypatch, "--whatever", name="train") == {}
