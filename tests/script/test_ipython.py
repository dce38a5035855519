"""Magics that a script has IPython run: in the script's names, and without a trace of a front end."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython

from accelerate_nb.script import shell
from accelerate_nb.script.ipython import ScriptShell
from tests.export.making import exported
from tests.processes import python

EXTENSION = """
def load_ipython_extension(shell):
    shell.register_magic_function(str.upper, "line", "shout")
    shell.register_magic_function(lambda line, cell: [line, cell], "cell", "kept")
"""


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return python(path, folder=path.parent)


def test_magics_of_an_extension_run_with_the_scripts_names(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(EXTENSION)
    path = exported(
        tmp_path,
        "%load_ext loud\nword = 'outer'",
        "x = %shout {word}\nx",
        "def f(word):\n    y = %shout $word {word}\n    return y\n\nprint(f('inner'))",
        "%%kept $word\n'''a'''\n  b\\n",
    )
    done = run(path)
    assert done.stderr == ""
    assert done.stdout == "'OUTER'\nINNER INNER\n['outer', \"'''a'''\\n  b\\\\n\\n\"]\n"


def test_python_is_the_same_after_a_magic(tmp_path: Path) -> None:
    state = (
        "import builtins, sys\n"
        "(hasattr(sys, 'ps1'), hasattr(builtins, '__IPYTHON__'), hasattr(builtins, 'display'),\n"
        " vars(sys.modules['__main__']) is globals(), str(get_ipython()), open is builtins.open, exit is builtins.exit)"
    )
    done = run(exported(tmp_path, state, "%timeit -n 1 -r 1 -q pass", state))
    before, after = done.stdout.splitlines()
    assert before == after == "(False, False, False, True, 'None', True, True)"


def test_an_error_in_a_file_ends_the_script_and_names_the_cell(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("x = 1\n1 / 0")
    done = run(exported(tmp_path, "%run fails.py\n", "print('never')"))
    assert (done.returncode, done.stdout) == (1, "")
    lines = [line for line in done.stderr.splitlines() if line.strip("^~ ")]
    assert [line for line in lines if not line.startswith("    ")] == [
        "Traceback (most recent call last):",
        "  train.ipynb, cell 1, line 1, in <module>",
        f'  File "{tmp_path}/fails.py", line 2, in <module>',
        "ZeroDivisionError: division by zero",
    ]


def test_a_script_loads_ipython_for_such_magics_only(tmp_path: Path) -> None:
    ours = "!true\n%matplotlib inline\nimport sys\n'IPython' in sys.modules"
    assert run(exported(tmp_path, ours)).stdout == "False\n"
    assert run(exported(tmp_path, f"x = %pwd\n{ours}")).stdout == "True\n"


def test_a_notebook_is_run_as_the_script_that_it_is(tmp_path: Path) -> None:
    exported(tmp_path, "%env B=2\ny = x + 1\n%accelerate status", name="other.ipynb")
    assert run(exported(tmp_path, "x = 1\n%run other.ipynb\ny")).stdout == "env: B=2\n2\n"


def called(call: str, names: dict[str, Any]) -> Any:
    """What a magic gives in a script with these names."""
    names |= {"line": shell.line, "cell": shell.cell}
    return eval(call, names)


def test_a_value_is_deleted_with_all_its_names() -> None:
    names = {"x": (value := [1]), "y": value, "z": [1]}
    called("line('xdel', 'x')", names)
    assert {"x", "y", "z"} & names.keys() == {"z"}


def test_long_texts_are_printed_and_no_page_is_turned(capsys: pytest.CaptureFixture[str]) -> None:
    called("line('prun', 'sum(range(10))')", {})
    assert "function calls" in capsys.readouterr().out


def test_libraries_find_the_shell_while_a_magic_runs_only() -> None:
    names = {"get": get_ipython, "__name__": "mine"}
    called("cell('prun', '-q', 'found = get()')", names)
    assert isinstance(names["found"], ScriptShell)
    assert get_ipython() is not names["found"]
    with pytest.raises(UsageError):
        called("line('no_such_magic', '')", names)


def test_an_error_of_or_below_a_magic_names_the_cell_and_the_line(tmp_path: Path) -> None:
    done = run(exported(tmp_path, "x = 1", "%sql select {x}"))
    assert done.returncode == 1
    assert "  train.ipynb, cell 2, line 1, in <module>" in done.stderr
    assert "Line magic function `%sql` not found" in done.stderr
    # what is captured of a cell is what it prints, without its last value
    cells = "%%capture x\nprint(0)\n'value'", "\n%%capture\n%%time\ny = 1\n# why\nz = [1,\n  y / int(x.stdout)]"
    done = run(exported(tmp_path, *cells, "print('never')"))
    assert "ZeroDivisionError: division by zero" in done.stderr
    frames = [line for line in done.stderr.splitlines() if line.startswith("  ") and not line.startswith("    ")]
    assert frames == [f"  train.ipynb, cell 2, line {line}, in <module>" for line in (2, 3, 7)]
