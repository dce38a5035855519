"""Tracebacks of a script name the notebook's cells and lines."""

import sys
from pathlib import Path

from accelerate_nb.script.shell import traceback_text
from tests.export.making import exported
from tests.processes import python


def raised(path: Path) -> str:
    """What a script that fails writes, in this process."""
    try:
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})
    except Exception as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # as if it was the main module
        return traceback_text(error, str(path))
    finally:
        sys.excepthook = sys.__excepthook__
    raise AssertionError("nothing was raised")


def carets_left_out(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip("^~ ")]


def test_cells_and_lines_take_the_place_of_the_scripts(tmp_path):
    path = exported(tmp_path, "def divide(x):\n    return 1 / x\n", "x = 0\n\ndivide(\n    x\n)")
    # since Python 3.13, the other lines of a statement are shown too
    assert [line for line in carets_left_out(raised(path)) if line.strip() not in {"x", "))"}] == [
        "Traceback (most recent call last):",
        "  train.ipynb, cell 2, line 3, in <module>",
        "    nb_shell.shown(divide(",
        "  train.ipynb, cell 1, line 2, in divide",
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
    ]


def test_causes_and_what_is_awaited_are_named_without_what_runs_them(tmp_path):
    handles = "try:\n    await f()\nexcept KeyError as error:\n    raise ValueError('b') from error"
    text = raised(exported(tmp_path, "async def f():\n    raise KeyError('a')", handles))
    assert carets_left_out(text) == [
        "Traceback (most recent call last):",
        "  train.ipynb, cell 2, line 2, in <module>",
        "    await f()",
        "  train.ipynb, cell 1, line 2, in f",
        "    raise KeyError('a')",
        "KeyError: 'a'",
        "The above exception was the direct cause of the following exception:",
        "Traceback (most recent call last):",
        "  train.ipynb, cell 2, line 4, in <module>",
        "    raise ValueError('b') from error",
        "ValueError: b",
    ]


def test_a_syntax_error_elsewhere_keeps_its_place(tmp_path):
    text = raised(exported(tmp_path, "compile('a b', 'other.py', 'exec')"))
    assert '  File "other.py", line 1\n    a b\n' in text
    assert "  train.ipynb, cell 1, line 1, in <module>" in text


def test_errors_of_this_package_show_none_of_its_lines(tmp_path):
    text = raised(exported(tmp_path, "from accelerate_nb.export.notebook import read\nread('nothing')"))
    assert "accelerate_nb/export" not in text
    assert text.endswith("but there is no such file. Correct its path.\n")
    # an error of Python's own shows where it was raised
    text = raised(exported(tmp_path, "from accelerate_nb.export.script import as_script\nas_script(3)"))
    assert "accelerate_nb/export/script.py" in text
    assert "train.ipynb, cell 1, line 2" in text


def test_python_ends_the_script_as_ever(tmp_path):
    path = exported(tmp_path, "import sys\nprint('begun', flush=True)", "what = sys.argv[1]", "exec(what)")
    failed = python(path.name, "1 / 0", folder=tmp_path)
    assert failed.returncode == 1
    assert "  train.ipynb, cell 3, line 1, in <module>\n" in failed.stderr
    assert "train.py" not in failed.stderr
    assert python(path, "sys.exit(7)").returncode == 7
    stopped = python(path, "raise KeyboardInterrupt")
    assert stopped.returncode in (-2, 130)
    assert "KeyboardInterrupt" in stopped.stderr
