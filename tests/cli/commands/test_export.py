"""`accelerate-nb export` writes a script whole or not at all, and never loses a file of somebody's own."""

import os

import pytest

from accelerate_nb.cli.main import main
from tests.export.making import code, notebook
from tests.processes import python


@pytest.fixture
def train(tmp_path):
    return notebook(tmp_path / "train.ipynb", "x = 6", "x * 7", code("1 / 0", "raises-exception"))


def test_the_script_stands_beside_the_notebook_and_runs(train, capsys):
    assert main(["export", str(train)]) == 0
    output = capsys.readouterr()
    path = train.with_suffix(".py")
    assert output.out == ""
    assert "train.ipynb, cell 3, line 1: the cell was left out" in output.err
    assert f"python {path}, or accelerate-nb launch {path}" in output.err
    done = python("-W", "error", path, check=True)
    assert (done.stdout, done.stderr) == ("42\n", "")


@pytest.mark.parametrize("words", [["--stdout"], ["-o", "-"]])
def test_the_script_goes_to_standard_output(train, capsys, words):
    assert main(["export", str(train), *words]) == 0
    assert capsys.readouterr().out.startswith("# Exported from train.ipynb by accelerate-nb ")
    assert os.listdir(train.parent) == ["train.ipynb"]


def test_standard_output_and_a_file_together_are_refused(train, capsys):
    assert main(["export", str(train), "--stdout", "-o", "x.py"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "--stdout and -o x.py were both given, and a script goes to one of them. Leave one out." in output.err


def test_an_exported_script_is_replaced_with_its_permissions(train):
    path = train.with_name("other.py")
    assert main(["export", str(train), "-o", str(path)]) == 0
    first = path.read_text()
    path.chmod(0o750)
    path.write_text(first + "print('changed')\n")
    assert main(["export", str(train), "-o", str(path)]) == 0
    assert path.read_text() == first
    assert path.stat().st_mode & 0o777 == 0o750
    assert sorted(os.listdir(train.parent)) == ["other.py", "train.ipynb"]


def test_a_file_of_somebodys_own_stays_unless_it_is_named(train, capsys):
    path = train.with_suffix(".py")
    path.write_text("print('mine')\n")
    assert main(["export", str(train)]) == 1
    assert "which holds something else. Pass --force" in capsys.readouterr().err
    assert path.read_text() == "print('mine')\n"
    assert main(["export", str(train), "--force"]) == 0
    assert path.read_text().startswith("# Exported from")


def test_a_notebook_that_cant_be_a_script_leaves_what_is_there(train, capsys):
    assert main(["export", str(train)]) == 0
    before = train.with_suffix(".py").read_text()
    notebook(train, "x = (", "ok = 1", "return x")
    assert main(["export", str(train)]) == 1
    message = capsys.readouterr().err
    assert "train.ipynb, cell 1, line 1: `x = (` is no Python: '(' was never closed" in message
    assert "train.ipynb, cell 3, line 1: `return x` is no Python: 'return' outside function" in message
    assert train.with_suffix(".py").read_text() == before
    assert sorted(os.listdir(train.parent)) == ["train.ipynb", "train.py"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nothing.ipynb"], 2, "there is no such file. Correct its path"),
        (["."], 2, "it is a folder"),
        (["train.ipynb", "-o", "."], 2, "which is a folder. Name a file in it: -o train.py"),
        (["train.ipynb", "-o", "train.ipynb", "--force"], 2, "which is the notebook itself"),
        (["train.ipynb", "-o", "no/folder/train.py"], 1, "it can't be: No such file or directory"),
    ],
)
def test_what_cant_be_read_or_written_is_reported_in_one_line(train, monkeypatch, capsys, words, code, message):
    monkeypatch.chdir(train.parent)
    assert main(["export", *words]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_exporting_imports_nothing_heavy(tmp_path):
    # an operator of plain Python is no magic
    train = notebook(tmp_path / "train.ipynb", "x = 1 % 2", "x")
    program = (
        "import sys; from accelerate_nb.cli.main import main\n"
        f"main(['export', {str(train)!r}])\n"
        "print([name for name in ('torch', 'IPython', 'nbformat', 'numpy', 'yaml', 'rich') if name in sys.modules])"
    )
    assert python("-c", program, check=True).stdout == "[]\n"


@pytest.mark.parametrize(("name", "cell"), [("random", "x = 1"), ("mypackage", "import mypackage.part")])
def test_a_script_does_not_hide_the_module_of_its_name(tmp_path, capsys, name, cell):
    book = notebook(tmp_path / f"{name}.ipynb", cell)
    assert main(["export", str(book)]) == 1
    message = capsys.readouterr().err
    assert f"`import {name}` would find that" in message
    assert f"-o {tmp_path / name}_script.py" in message
    assert os.listdir(tmp_path) == [book.name]
    assert main(["export", str(book), "-o", str(tmp_path / f"{name}_script.py")]) == 0
    # a name that nobody imports
    assert main(["export", str(notebook(tmp_path / "test.ipynb", "x = 1"))]) == 0
