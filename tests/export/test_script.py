"""A script does what its notebook does, line for line."""

import ast
import contextlib
import io
import sys
from pathlib import Path
from unittest.mock import patch

import nbformat
import pytest
from nbclient import NotebookClient

from accelerate_nb.errors import ExportError
from tests.export.making import cell_lines, code, exported, markdown, script
from tests.processes import python

# What a notebook's own kernel and the script's Python have to agree about.
CELLS = [
    markdown("# The same\n\nin both"),
    "from __future__ import annotations\nimport asyncio\n\nprint('begun')",
    "x: Undefined = 3\nx",
    "x;",
    "x ; # quiet",
    "x  # loud;",
    "'é'; 'ö'",
    "x, 'two'",
    "(x,\n 'two')",
    "None",
    "'''a\n  text'''",
    "# only a comment",
    "",
    "def f(y):\n    '''It\n    adds.'''\n    return x + y\n\nf(4)",
    "from __future__ import division; text = f'''{x}\n  {f(1)}'''; print(text)",
    "display(x, [1, 2])\n[n := 5 for _ in 'ab']",
    "async def later(value):\n    await asyncio.sleep(0)\n    return value\nvalue: int = await later(x)\nvalue",
    "task = asyncio.create_task(later('task'))\nvalues = [each async for each in aiter_of(3)] if x > 3 else n",
    "print(await task)\nasync with asyncio.Lock():\n    locked = True\nlocked, values, await later(1)",
    "if x:\n\tprint('tab')\n\tprint('tab')\nfor i in range(2):\n    i",
    "lambda: 1\n{'b': 1, 'a': {3, 1, 2}}",
    "if __name__ == '__main__':\n    print('the main module')",
    "wait = parameters = shown = 3\nwait",
    "class A:\n    size = len(text)\n    def __repr__(self): return 'two\\nlines'\nA()",
    "list(range(60))",
    "(\n  x +\n  1\n)",
    "print(f.__doc__, f.__name__, __name__)",
    "print([_ for _ in 'ab'], {_: 1 for _ in 'a'})",
    "u = 1; \\\nv = print(u)",
    "config, kinds, home = {'a': 1}, [], A()\nconfig['lr'] = 0.1\nkinds.append(2)\nhome.place = 3",
    "rate = config['lr']\nkind = kinds[0]\nplace = home.place\nrate, kind, place",
    "class Stream:\n    async def __aenter__(self): return self\n    async def __aexit__(self, *_): pass",
    "async def numbers(self):\n    for number in (1, 2): yield number\nStream.__aiter__ = numbers",
    "async with Stream() as s:\n    async for last in s:\n        seen = [(kept := item) async for item in s]\nlast, seen, kept",
    "first: int = await later(1)\nsecond: dict[\n  str, int\n] = (\n  await later({'a': first}))\nthird: str\nfirst, second",
    "import os.path as p; moved = await later(p.sep)\nfrom os.path import sep\ndef held(): return moved\nmoved, held(), sep",
    "moved = await later(5)\nmoved, held()",
    "try:\n    await later(1) / 0\nexcept ZeroDivisionError as error:\n    reason = str(error)\nreason",
    "match await later([1, 2, 3]):\n    case [one, *others]: print(one, others)",
    "from __future__ import (division,\n    print_function)",
]


def shown_by_a_kernel(path: Path) -> list[str]:
    content = nbformat.read(path, as_version=4)
    # a busy kernel sends a line and its end apart
    NotebookClient(content, timeout=60, kernel_name="python3", coalesce_streams=True).execute()
    outputs = [output for cell in content.cells for output in cell.get("outputs", ())]
    texts = [output.get("text", output.get("data", {}).get("text/plain", "")) for output in outputs]
    return [line for text in texts for line in text.rstrip("\n").split("\n")]


def test_a_script_writes_what_the_notebook_shows(tmp_path):
    path = exported(tmp_path, *CELLS)
    done = python("-W", "error", path)
    assert done.stderr == ""
    assert done.stdout.rstrip("\n").split("\n") == shown_by_a_kernel(path.with_suffix(".ipynb"))


def ran(text: str, name: str = "__main__") -> str:
    """What a script writes, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as written, patch.object(sys, "excepthook"):
        exec(compile(text, "train.py", "exec"), {"__name__": name, "__file__": "train.py"})
    return written.getvalue()


def test_lines_are_the_notebooks_and_all_others_are_marked(tmp_path):
    raw = {"cell_type": "raw", "source": "raw"}
    text = script(tmp_path, markdown("# Title\ntext"), "import os\nprint(1)", "", raw, "2").text
    assert cell_lines(text) == [
        "# %% [markdown]",
        "# # Title",
        "# text",
        "# %% [1] train.ipynb",
        "import os",
        "    print(1)",
        "# %% [2] train.ipynb",
        "    nb_shell.shown(2)",
    ]


def test_a_script_that_is_imported_does_nothing(tmp_path):
    text = script(tmp_path, *CELLS).text
    assert ran(text, "__mp_main__") == ran(text, "train") == ""
    # and is the same each time
    assert script(tmp_path, *CELLS).text == text


def test_the_first_lines_explain_how_to_run_it(tmp_path):
    lines = script(tmp_path, "x = 1").text.split("\n")
    assert lines[0].startswith("# Exported from train.ipynb by accelerate-nb ")
    assert [line.split("    ")[0] for line in (item.removeprefix("#     ") for item in lines[2:5])] == [
        "python train.py",
        "accelerate-nb launch -n 2 train.py",
        "torchrun --nproc-per-node 2 train.py",
    ]


def test_cells_are_left_out_by_their_tags(tmp_path):
    cells = [code("a = = 1", "skip-script"), code("%%no", "remove-script"), code("1/0", "raises-exception"), "4"]
    found = script(tmp_path, *cells)
    assert cell_lines(found.text) == ["# %% [3] train.ipynb", "# 1/0", "# %% [4] train.ipynb", "    nb_shell.shown(4)"]
    assert found.notes == (
        "train.ipynb, cell 3, line 1: the cell was left out: it is tagged `raises-exception`, and would end the script.",
    )


def test_a_launcher_of_hugging_face_is_named_with_the_one_that_any_launcher_can_start(tmp_path):
    (note,) = script(tmp_path, "import os\nfrom accelerate import Accelerator, notebook_launcher").notes
    assert note.startswith("train.ipynb, cell 1, line 2: accelerate's notebook_launcher starts processes of its own")
    assert note.endswith("import notebook_launcher from accelerate_nb.")
    assert script(tmp_path, "from accelerate_nb import notebook_launcher").notes == ()


def test_values_that_a_run_was_given_are_none_of_a_script(tmp_path):
    found = script(tmp_path, code("lr = 0.1", "parameters"), code("lr = 0.5", "injected-parameters"), "print(lr)")
    assert "0.5" not in found.text
    assert [parameter.default for parameter in found.parameters] == ["0.1"]


def test_every_cell_that_is_no_python_is_named_in_one_error(tmp_path):
    with pytest.raises(ExportError) as caught:
        script(tmp_path, "x = = 1", "fine = 1", "\nprint 'a'", "return 3", "def f():\n    await g()")
    message = str(caught.value)
    assert "train.ipynb, cell 1, line 1: `x = = 1` is no Python: invalid syntax" in message
    assert "train.ipynb, cell 3, line 2: `print 'a'` is no Python: Missing parentheses" in message
    assert "train.ipynb, cell 4, line 1: `return 3` is no Python: 'return' outside function" in message
    assert "train.ipynb, cell 5, line 2: `await g()` is no Python: 'await' outside async function" in message
    assert "cell 2" not in message


def test_what_stands_before_a_magic_is_not_shown_nor_what_gives_none(tmp_path):
    for source in ("print(x)", "plt.show()", "None"):
        assert cell_lines(script(tmp_path, source).text)[-1].strip() == source
    assert "    x" in cell_lines(script(tmp_path, "x\n%matplotlib inline").text)
    assert '    nb_shell.run("ls")' in cell_lines(script(tmp_path, "!ls").text)


def test_results_that_only_ipython_keeps_are_named(tmp_path):
    with pytest.raises(ExportError) as caught:
        script(tmp_path, "1", "x = _\ny = Out[1]", "def f():\n    return [3 for _ in 'ab']")
    assert "train.ipynb, cell 2, line 1: `_` is what IPython keeps of other cells" in str(caught.value)
    assert "train.ipynb, cell 2, line 2: `Out` is what" in str(caught.value)
    assert script(tmp_path, "for _ in range(3): print(_)")


def test_display_is_ours_until_the_notebook_has_another(tmp_path):
    ours = "from accelerate_nb.script.shell import display"
    assert ours in script(tmp_path, "def f(): display(1)").text
    assert ours not in script(tmp_path, "a.display(1)").text
    assert ran(script(tmp_path, "display(1)", "display = print", "display('theirs')").text) == "1\ntheirs\n"


def test_names_of_ours_never_meet_those_of_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    cells = ["shown = run = 1\nwait = 3\noptions = parameters = 4\nstart = begin = 5", code("a = 1", "parameters")]
    text = script(tmp_path, *cells, "async def f(x): return x", "await f(a)").text
    assert "a, = nb_options.instead_of(a)  # +" in text
    assert ran(text) == "1\n"


def test_imports_from_the_future_stand_once_at_the_top(tmp_path):
    text = script(
        tmp_path,
        "'''doc'''\nfrom __future__ import annotations",
        "x = 1\nfrom __future__ import (\n    division,\n    annotations,\n)\nfrom __future__ import generators; y = 2",
        "print(x, y)",
    ).text
    assert "from __future__ import annotations, division, generators  # +" in text
    assert ran(text) == "1 2\n"


def test_a_script_of_nothing_is_a_script(tmp_path):
    ast.parse(script(tmp_path).text)
    assert ran(script(tmp_path, "", markdown("")).text) == ""


def test_options_change_what_the_cells_begin_with(tmp_path):
    parameters = code("rate: float = 1  # learning rate\nsizes = (1, 2)", "parameters")
    path = exported(tmp_path, markdown("text\n\n## Train a model ##"), parameters, "rate, sizes")
    assert python(path).stdout == "(1, (1, 2))\n"
    assert python(path, "--rate", "0.5", "--sizes", "3").stdout == "(0.5, (3,))\n"
    assert "Train a model\n" in python(path, "--help").stdout
    wrong = python(path, "--rat", "3")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "Did you mean --rate?" in wrong.stderr


def test_a_debugger_can_run_it(tmp_path):
    path = exported(tmp_path, "x = 20", "print(x + 3)")
    assert python("-m", "pdb", "-c", "continue", "-c", "quit", path).stdout.startswith("23\n")


def test_a_magic_that_reads_like_python_is_refused_where_nothing_has_its_name(tmp_path):
    with pytest.raises(ExportError) as caught:
        script(tmp_path, "x = 1", "\nls -la", "pwd")
    assert "cell 2, line 2: nothing is called `ls`, so it is a magic: write `%ls -la`." in str(caught.value)
    assert "cell 3, line 1: nothing is called `pwd`" in str(caught.value)
    script(tmp_path, "ls, la = 3, 2", "ls -la", "import time", "time")
    script(tmp_path, "%run setup.ipynb", "env.reset()", "history", "config['lr']")
