"""What a script does in the place of IPython's syntax: the same as the notebook does."""

import ast
import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from accelerate_nb.export.magics import plain
from accelerate_nb.export.notebook import NotebookCell
from accelerate_nb.export.script import NotebookTranslation
from accelerate_nb.script import shell as nb_shell

# Plain Python for IPython too: not a character of it changes.
PYTHON = {
    "operators": "a = 7 % 2\nb = 1 != 2\nc = '%d%%' % a\n",
    "f-strings": "x = 1\ny = f'{x!r} {x=} 50% !'\nz = f'''\n%time {x}\n!ls\n'''\n",
    "texts": "x = '''\n%time 1\n!ls\n?\n/f\n'''\ny = 'a?'  # really? !ls %time\n",
    "brackets": "x = (7\n  % 4)\ny = [7\n% 4]\n",
    "backslashes": "x = 7 \\\n% 4\n",
    "annotation": "x: int = 3\n",
    "await": "async def f(): return 1\nx = await f()\n",
    "blank lines": "\n\n  \nx = 1\n\n\n",
    "comments": "# %time\n# !ls\nx = 1  # %%bash\n",
}

# Cells that IPython runs, and that a script runs alike: the same names, output, files, folder and environment.
ALIKE = {
    "a command": "!echo hello\nx = 1",
    "a command's values": "n = 3\nname = 'a b'\n!echo {n + 1} \"{name}\" {n!r}\n!echo $name",
    "a command of the shell's": "!echo $HOME ${HOME} {none} $none | wc -w",
    "a mixed command": "n = 1\n!echo {n} $none_such_variable",
    "a value without an answer": "x = 5\n!echo $x {1 / 0}\n!echo $x.real",
    "braces of the shell": "!mkdir -p {train,test} && ls -1\n!echo {} {{x}}",
    "a list in braces": "a, b = 'd', 'e'\n!mkdir {a} {b}\n!ls -1\n!echo {a,b}",
    "another's braces": "!echo \"%{http_code}\"\n!echo '{none}'\n!echo stash@{none}",
    "dollars": "x = 5\n!echo $$x '$x' \"$x\" a$",
    "awk": "!echo 'a b' | awk '{print $2}'",
    "quotes": '!echo \'a\\tb\' "it\'s" \\"c\\"',
    "continued": "!echo a \\\n  b \\\n  c\nx = 2",
    "standard error": "!ls no_such_file 2>&1 | wc -l",
    "a failure": "!false\nx = 1",
    "captured": "x = !echo a; echo b\ny = (x.n, x.s, x.l, len(x))",
    "captured failure": "x = !echo a; echo b >&2; exit 3\ny = (list(x), x.s)",
    "captured values": "n = 'q'\nx = !echo {n} $n\na, b = !echo 1; echo 2",
    "captured in a block": "for i in range(2):\n    x = !echo {i}\n    y = x[0]",
    "double bang": "!!echo a\nx = 1",
    "in a function": "def f(n):\n    !echo {n}\n    x = !echo {n + 1}\n    return x[0]\ny = f(3)",
    "in a class": "class A:\n    if True:\n        !echo here\n    y = 1\nz = A.y",
    "in nested blocks": "for i in range(2):\n    if i:\n        !echo {i}\n    else:\n        %load_ext autoreload\nx = i",
    "%cd": "import os\nos.mkdir('in ner')\n%cd -q in ner\n!pwd | xargs -0 basename\n%cd -q -\nx = 1",
    "%cd quoted": "import os\nos.mkdir('in ner')\n%cd -q 'in ner'",
    "%cd value": "import os\nos.mkdir('inner')\nd = 'inner'\n%cd -q {d}",
    "%cd nowhere": "%cd -q no_such_folder",
    "%pwd": "import os\nx = %pwd\ny = os.path.samefile(x, '.')\ndel x",
    "%env": "%env NB_TEST_A=1\n%env NB_TEST_B 2 3\nv = 'w'\n%set_env NB_TEST_C={v}\nx = %env NB_TEST_A",
    "%env from a dollar": "v = 7\n%env NB_TEST_A=$v",
    "%env with an equals sign": "%env NB_TEST_A=a=b",
    "%time statement": "%time x = 3",
    "%time value": "x = %time 6 * 7",
    "%time several": "%time x = 1; y = 2",
    "%time loop": "%time for i in range(3): print(i)",
    "%time in a function": "def f():\n    x = %time 3\n    return x\ny = f()",
    "%time silent": "%time 3;\nx = 1",
    "%%time": "%%time\nx = 1\ny = '''\n  a\n'''\n",
    "%%time loop": "%%time\nz = []\nfor i in range(2):\n    z.append('''a\n b''')\n",
    "%%time behind blank lines": "\n\n%%time\nx = 1",
    "%%time with magics": "%%time\n!echo a\nx = !echo b",
    "%%time comment": "%%time\nx = 1  # why; not\n\n",
    "%timeit": "%timeit -n 2 -r 1 pass\nx = 1",
    "%timeit -o": "r = %timeit -n 2 -r 3 -q -o pass\nx = (r.loops, r.repeat, len(r.all_runs))\ndel r",
    "%%timeit": "%%timeit -n 1 -r 1 a = 3\nb = a\nc = '''\n'''",
    "%%capture": "%%capture out\nprint('hidden')\nx = 1",
    "%%capture without a name": "%%capture\nprint('hidden')\n!echo hidden\nx = '''a\n b'''",
    "%%capture of definitions": "%%capture\nimport json\ndef f():\n    return 1\n",
    "%%capture of %%time": "%%capture\n%%time\nx = 1",
    "%%writefile": "%%writefile a.py\nimport re\n\nx = re.compile(r'\\d+')\ny = '''a\n\"\"\" b'''\n",
    "%%writefile twice": "%%writefile a.txt\na\\",
    "%%writefile spaces": "%%writefile a.txt\na\n   \n\tb  \n\n",
    "%%writefile -a": "%%writefile -a a.txt\nmore",
    "%%file": "%%file 'b c.txt'\n\"quoted\"",
    "%%bash": "%%bash\nfor i in 1 2; do\n  echo \"$i\" '\\n' {x}\ndone\n",
    "%%bash --out": "%%bash --out x --err y --no-raise-error\necho a\necho b >&2\nexit 3",
    "%%sh --no-raise-error": "%%sh --no-raise-error\necho a\nexit 3",
    "%%script": "%%script bash -e\necho a; echo '''b'''",
    "%%script false": "%%script false --no-raise-error\nx = 1",
    "%%script nowhere": "%%script no_such_program_here\nx = 1",
    "%%sx": "%%sx\necho a\necho b",
    "%run": "open('p.py', 'w').write('import sys\\na = sys.argv[1:]\\nn = __name__\\n_h = 1')\n%run p.py b 'c d' *.py",
    "%run -n": "open('p.py', 'w').write('n = __name__')\n%run -n p",
    "%run -i": "open('p.py', 'w').write('y = x + 1')\nx = 1\n%run -i p.py",
    "%run exits": "open('p.py', 'w').write('import sys\\ny = 1\\nsys.exit(0)')\n%run p.py\nz = 2",
    "%mkdir": "%mkdir deep\n%cp -r deep other\nx = 1",
    "automagic": "mkdir deep",
    "automagic of IPython's": "timeit -n 1 -r 1 -q pass",
    "%alias": "%alias nb_hello echo hello\nx = 1\n%nb_hello {x} $x",
    "%%prun": "%%prun -q\nx = 1\n!echo a",
    "%%timeit with magics": "%%timeit -n 1 -r 1 -q\n!echo a\n%env NB_TEST_A=1",
    "%time of a loop as a value": "x = %time for i in range(2): print(i)",
    "%time of another magic": "%time %env NB_TEST_A=1",
    "%env of a name in braces": "v = 'NB_TEST_A'\n%env {v}=1",
    "%run -t": "open('p.py', 'w').write('n = 1')\n%run -t -i p.py",
    "quoting": "def f(*args):\n    print(args)\n,f a b\n;f a b\n/f 1 2",
    "prompts": ">>> x = 1\n>>> for i in range(2):\n...     x += i\n",
    "IPython's prompts": "In [1]: x = 1\n\nIn [2]: y = 2",
    "indented": "    x = 1\n    !echo a\n    if x:\n        y = 2",
    "texts around magics": "x = '''\n%time 1\n!ls\n'''\n!echo a\ny = f'''{x!r}\n?'''",
    "unicode": "ü = 'ä'\n!echo {ü} é\nw = !echo ñ",
    "own calls": "get_ipython().system('echo a')\nx = get_ipython().getoutput('echo b')\n"
    "get_ipython().run_line_magic('env', 'NB_TEST_A=2')",
    "own calls on one line": "import json as a; get_ipython().run_line_magic('reload_ext', 'autoreload'); import json as b\n"
    "get_ipython().system('echo a'); get_ipython().system('echo b'); x = get_ipython().getoutput('echo c')  # all three",
    "own calls over lines": "get_ipython().run_line_magic(\n    'env', 'NB_TEST_A=2'\n); y = get_ipython().getoutput(\n'echo b')",
    "annotated": "x: list = !echo a",
}

MEASURED = re.compile(r"[\d.]+(?:e[+-]\d+)? ?(?:ns|μs|us|ms|s|min|h)\b")


@pytest.fixture(scope="module")
def shell() -> InteractiveShell:
    """IPython as a kernel has it, without its history."""
    config = Config()
    config.HistoryManager.enabled = False
    # a shell takes the places of both
    main, excepthook = sys.modules["__main__"], sys.excepthook
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config)
    # a kernel says nothing to a terminal
    shell.displayhook.write_output_prompt = lambda: None
    shell.displayhook.write_format_data = lambda *_: None
    yield shell
    InteractiveShell.clear_instance()
    sys.modules["__main__"], sys.excepthook = main, excepthook


def left_behind(names: dict[str, Any], output: str, folder: Path) -> dict[str, Any]:
    """What a program left behind: its names, its output, files, where it is, and variables of the environment."""
    return {
        "names": {
            name: plainly(value)
            for name, value in names.items()
            if not name.startswith("_") and name not in HIDDEN and not callable(value)
        },
        "output": MEASURED.sub("TIME", re.sub(r"\x1b\[[\d;]*m", "", output.replace("\r\n", "\n"))).split("\n"),
        "files": {
            str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in folder.rglob("*")
        },
        "folder": os.path.relpath(os.getcwd(), folder),
        "environment": {name: value for name, value in os.environ.items() if name.startswith("NB_TEST")},
    }


HIDDEN = {"In", "Out", "exit", "quit", "get_ipython", "open", "os", "json", "nb_shell"}


def plainly(value: Any) -> Any:
    """A value that can be compared with another's."""
    captured = getattr(value, "stdout", None)
    return captured if isinstance(captured, str) else value


def clean_environment(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SHELL", "/bin/bash")
    for name in [name for name in os.environ if name.startswith(("NB_TEST", "LOCAL_"))]:
        monkeypatch.delenv(name)


def in_ipython(shell: InteractiveShell, cell: str, folder: Path) -> dict[str, Any]:
    shell.reset(new_session=False)
    output = io.StringIO()
    with redirect_stdout(output):
        result = shell.run_cell(cell)
    assert result.success, output.getvalue()
    return left_behind(shell.user_ns, output.getvalue(), folder)


def as_script(cell: str, folder: Path) -> dict[str, Any]:
    translated = plain(cell)
    assert not translated.problems
    names: dict[str, Any] = {"__name__": "__main__", "nb_shell": nb_shell, "get_ipython": get_ipython}
    output = io.StringIO()
    source = "" if translated.left_out else translated.source
    with redirect_stdout(output):
        exec(compile(source, "<script>", "exec"), names)
    return left_behind(names, output.getvalue(), folder)


@pytest.mark.parametrize("cell", ALIKE.values(), ids=ALIKE.keys())
def test_a_cell_does_in_a_script_what_it_does_in_ipython(
    cell: str, shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def done(run: Callable[[str, Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            clean_environment(patch, folder)
            left = run(cell, folder)
        for name in left["environment"]:
            monkeypatch.delenv(name, raising=False)
        return left

    assert done(as_script, tmp_path / "script") == done(partial(in_ipython, shell), tmp_path / "notebook")


@pytest.mark.parametrize("cell", [*PYTHON.values(), *ALIKE.values()], ids=[*PYTHON, *ALIKE])
def test_a_translation_has_as_many_lines_as_its_cell_and_is_python(cell: str) -> None:
    found = plain(cell)
    assert found.source.count("\n") == cell.count("\n")
    ast.parse(found.source)


@pytest.mark.parametrize("cell", PYTHON.values(), ids=PYTHON.keys())
def test_plain_python_stays_what_it_is(cell: str) -> None:
    found = plain(cell)
    assert (found.source, found.notes, found.problems) == (cell, (), ())


def test_lines_that_do_not_change_stay_at_their_numbers() -> None:
    cell = "\nx = 1\n!echo a \\\n   b\ny = 2\n%pip install \\\n  z\nif x:\n    %time y\n    w = 3\n"
    before, after = cell.split("\n"), plain(cell).source.split("\n")
    assert [before[line] for line in (1, 4, 7, 9)] == [after[line] for line in (1, 4, 7, 9)]


@pytest.mark.parametrize(
    ("cell", "script"),
    [
        ("%load_ext accelerate_nb", "# %load_ext accelerate_nb"),
        ("%matplotlib inline", "# %matplotlib inline"),
        ("%matplotlib widget", "# %matplotlib widget"),
        ("%matplotlib agg", 'nb_shell.line("matplotlib", "agg")'),
        ("if x:\n    %matplotlib inline", "if x:\n    pass  # %matplotlib inline"),
        ("!python train.py --n {n}", 'nb_shell.run("python train.py --n {n}")'),
        ("x = !ls", 'x = nb_shell.capture("ls")'),
        ("%time f(x)", 'nb_shell.line("time", "f(x)")'),
        ("%%time\nx = 1\n!ls", 'nb_shell.cell("time", "", """\\\nx = 1\nnb_shell.run("ls")""")'),
        ("%%bash -e\nls\npwd", 'nb_shell.cell("bash", "-e", """\\\nls\npwd""")'),
        ("%run -m mod {x} '*.py'", 'nb_shell.line("run", "-m mod {x} \'*.py\'")'),
        ("x = %sql select 1", 'x = nb_shell.line("sql", "select 1")'),
        ("%%sql $x\nselect 1", 'nb_shell.cell("sql", "$x", """\\\nselect 1""")'),
        ("%load_ext other", 'nb_shell.line("load_ext", "other")'),
        ("x = %config", "x = None  # x = %config"),
        ("x = 1\nx?\n?x\nx??", "x = 1\n# x?\n# ?x\n# x??"),
    ],
)
def test_a_magic_reads_like_python(cell: str, script: str) -> None:
    assert plain(cell).source == script


@pytest.mark.parametrize(
    "magic",
    ["config X.y = 1", "autoreload 2", "precision 3", "pdb on", "colors linux", "xmode Plain", "who",
     "whos", "history", "pinfo x", "env", "lsmagic", "reset -f", "pip install x", "conda install x",
     "tensorboard --logdir runs"],
)  # fmt: skip
def test_what_is_left_out_is_reported_with_its_line(magic: str) -> None:
    found = plain(f"x = 1\n%{magic}\n")
    assert found.source == f"x = 1\n# %{magic}\n"
    assert [note.line for note in found.notes] == [2]
    assert "was left out" in found.notes[0].text
    assert not found.problems


@pytest.mark.parametrize("name", ["html", "javascript", "latex", "markdown", "svg", "HTML", "js"])
def test_cells_that_only_show_something_are_left_out_with_a_note(name: str) -> None:
    found = plain(f"%%{name}\n<b>\n%time\n")
    assert found.left_out
    assert found.source == f"# was: %%{name}\n# <b>\n# %time\n#"
    assert [note.line for note in found.notes] == [1]


@pytest.mark.parametrize(
    ("cell", "line", "words"),
    [
        ("x = 1\n%edit x", 2, "%edit means nothing outside of a notebook. Tag the cell `skip-script`"),
        ("def f():\n    x = 1\n    %load x.py", 3, "%load"),
        ("%%debug\nx", 1, "%%debug"),
        ("%debug", 1, "%debug"),
        ("%macro x 1", 1, "%macro"),
        ("x = 1\n%%time\ny = 2", 2, "%%time is below other lines"),
        ("# comment\n%%bash\nls", 2, "%%bash is below other lines"),
        ("%%time x = 1\ny = 2", 1, "%%time takes no statement"),
        ("%%time\n", 1, "%%time has nothing below it"),
        ("%%time\nx = 1\n%debug", 3, "%debug"),
        ("%%capture\n\n%debug", 3, "%debug"),
        ("%time %debug", 1, "%debug"),
        ("%run -d x.py", 1, "debugger"),
        ("x = 1\n!ls\nls -l foo", 3, "`ls` is a magic: write `%ls -l foo`"),
    ],
)
def test_what_means_nothing_in_a_script_is_refused_with_its_line(cell: str, line: int, words: str) -> None:
    (problem,) = plain(cell).problems
    assert problem.line == line
    assert words in problem.text


@pytest.mark.parametrize(
    ("cell", "kept"),
    [
        ("%pip install -q x", 'nb_shell.line("pip", "install -q x")'),
        ("!pip3 install x", 'nb_shell.line("pip", "install x")'),
        ("!python -m pip install {x}", 'nb_shell.line("pip", "install {x}")'),
        ("!{sys.executable} -m pip install x", 'nb_shell.line("pip", "install x")'),
        ("%conda install x", 'nb_shell.line("conda", "install x")'),
        ("!sudo apt-get -y install x && pip install y", 'nb_shell.run("sudo apt-get -y install x && pip install y")'),
        ("%uv pip install x", 'nb_shell.line("uv", "pip install x")'),
        ("%%bash\npip install x\n", 'nb_shell.cell("bash", "", """\\\npip install x\n""")'),
        ("pip install x", 'nb_shell.line("pip", "install x")'),
        ("!/opt/bin/pip install x", 'nb_shell.run("/opt/bin/pip install x")'),
        ("!pip install 'x; os_name<\"a\"'", """nb_shell.run("pip install 'x; os_name<\\"a\\"'")"""),
        ("!pip install x # hi; there", 'nb_shell.run("pip install x # hi; there")'),
    ],
)
def test_packages_are_installed_by_a_script_on_request(cell: str, kept: str) -> None:
    left_out = plain(cell)
    assert "left out" in left_out.notes[0].text
    assert ast.parse(left_out.source).body == []
    assert plain(cell, keep_installs=True).source == kept


@pytest.mark.parametrize("command", ["pip list", "pip install x && python x.py", "echo pip install", "conda env list"])
def test_commands_that_do_more_than_install_are_kept(command: str) -> None:
    assert not plain(f"!{command}").notes


def test_cd_in_a_command_is_reported_to_have_no_effect() -> None:
    found = plain("!cd data\n!cd data && ls")
    assert found.source == '# !cd data\nnb_shell.run("cd data && ls")'
    assert "%cd changes the script's" in found.notes[0].text


@pytest.mark.parametrize("terms", [800, 3000, 100_000])
def test_a_cell_that_is_nested_too_deeply_is_a_problem_of_the_notebook(terms: int) -> None:
    (problem,) = plain(f"x = {'+'.join(['1'] * terms)}").problems
    assert "nested too deeply" in problem.text


@pytest.mark.parametrize("above", ["", "%%accelerate -n 2\n"])
def test_a_cell_that_is_nested_too_deeply_is_a_problem_beside_cells_on_ranks_too(above: str) -> None:
    texts = ("%%accelerate -n 2\nprint(rank)", f"{above}x = {'+'.join('1' * 3000)}")
    cells = [NotebookCell("code", text, number) for number, text in enumerate(texts, 1)]
    ((number, problem),) = NotebookTranslation("train.ipynb", cells).problems()
    assert number == 2
    assert "nested too deeply" in problem.text


def test_a_problem_shows_the_beginning_of_a_long_line_only() -> None:
    (problem,) = plain(f"print {'x' * 5000}").problems
    assert problem.text.startswith("`print xxx")
    assert len(problem.text) < 300
    assert "?." not in problem.text
