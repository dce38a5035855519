"""Code is found where it stands: in cells, in exported scripts, in warnings."""

import json
import linecache
import os
import traceback
from dataclasses import asdict
from pathlib import Path

import pytest

from accelerate_nb.sources.cells import CellSources, cell_line, current_sources, table
from tests.export.making import code, exported, markdown, notebook, script
from tests.processes import python


@pytest.fixture
def cell():
    name, lines = "<cell of a test>", ["def f():\n", "    raise ValueError('here')\n"]
    linecache.cache[name] = (10, None, lines, name)
    yield name, lines
    linecache.cache.pop(name, None)


def test_cells_travel_as_plain_values_and_show_up_in_tracebacks(cell):
    name, lines = cell
    # files stay where they are
    linecache.getline(__file__, 1)
    assert __file__ not in current_sources().lines
    plain = json.loads(json.dumps(asdict(current_sources())))
    del linecache.cache[name]
    sources = CellSources(**plain)
    assert sources.lines[name] == lines
    sources.install()
    names = {}
    exec(compile("".join(lines), name, "exec"), names)
    with pytest.raises(ValueError) as caught:
        names["f"]()
    assert "raise ValueError('here')" in "".join(traceback.format_tb(caught.value.__traceback__))
    linecache.checkcache()
    assert linecache.getline(name, 2) == lines[1]


def test_a_place_is_named_as_a_person_would():
    sources = CellSources({"/tmp/ipykernel_1/2.py": ["a\n"], "<string>": ["b\n"]}, {"/tmp/ipykernel_1/2.py": 3})
    assert sources.location("/tmp/ipykernel_1/2.py", 7) == "Cell In[3], line 7"
    assert sources.location("<string>", 1) == "a cell, line 1"
    assert sources.location("train.py", 2) == 'File "train.py", line 2'


CELLS = [
    "import os\n\nprint(\n    'a'\n)",
    markdown("# Title\n\n    code"),
    "\n\nx = 1  # +\ntext = '''\n  # %% [9] other.ipynb\n'''\nx",
    code("1 / 0", "raises-exception"),
    "async def f():\n    return 1\n\n\ny: int = await f()\n\ny",
    code("rate = 1", "parameters"),
]
SOURCES = [cell if isinstance(cell, str) else cell["source"][0] for cell in CELLS if cell is not CELLS[1]]


def test_every_line_of_every_cell_is_found_and_nothing_else(tmp_path):
    lines = script(tmp_path, *CELLS).text.split("\n")
    found = {place: lines[number - 1] for number, place in table(lines).items()}
    for cell, source in enumerate(SOURCES, start=1):
        for line, text in enumerate(source.split("\n"), start=1):
            # an annotated name stands in brackets: a function can't annotate a global one
            script_line = found[f"train.ipynb, cell {cell}, line {line}"].strip().replace("(y): int", "y: int")
            bare = text.strip()
            assert script_line in (bare, f"# {bare}", f"nb_shell.shown({bare})"), (cell, line)


def test_a_place_reads_as_a_person_writes_it(tmp_path):
    path = exported(tmp_path, *CELLS)
    number = path.read_text().split("\n").index("    nb_shell.shown(y)") + 1
    assert cell_line(str(path), number) == "train.ipynb, cell 4, line 7"
    assert CellSources({}, {}).location(str(path), number) == "train.ipynb, cell 4, line 7"
    assert CellSources({}, {}).location(str(path), 2) == f'File "{path}", line 2'
    assert cell_line(str(path), 1) is None
    assert cell_line(str(path), number + 1) is None  # what waits for the cell


def test_other_files_have_no_places(tmp_path):
    (tmp_path / "a.py").write_text("x\n# %% [1] a.ipynb\ny\n")
    assert cell_line(str(tmp_path / "a.py"), 3) is None
    assert cell_line(str(tmp_path / "none.py"), 3) is None
    assert cell_line(__file__, 3) is None
    assert table([]) == {}


@pytest.mark.parametrize("name", ["a b.ipynb", "ü [1].ipynb", "x\ny.ipynb", "a # +.ipynb"])
def test_any_name_of_a_notebook_is_kept(tmp_path, name):
    text = script(tmp_path, "x = 1", "y = 2", name=name).text.split("\n")
    line = text.index("y = 2") + 1
    assert str(table(text)[line]) == f"{name.replace(chr(10), '?')}, cell 2, line 1"
    assert notebook(tmp_path / name, "x").exists()


WARNS = "def careful():\n    x = 1\n    warnings.warn('take care')\n\ncareful()"


def stderr_of(folder: Path, *cells: str, flags: tuple[str, ...] = ()) -> str:
    """What a script writes to its standard error under plain Python."""
    path = exported(folder, "import warnings\nwarnings.simplefilter('always')", *cells)
    return python(*flags, path.name, folder=folder).stderr


def test_a_warning_names_notebook_cell_and_line(tmp_path: Path) -> None:
    cells = [
        WARNS,
        "import asyncio, os\nos.chdir('/')\nawait asyncio.sleep(0)\n\nwarnings.warn('old', DeprecationWarning)\nx = 1",
        "from accelerate_nb.user_warnings import warn_user\nwarn_user('of this package')\nx = 2",
    ]
    assert stderr_of(tmp_path, *cells).splitlines() == [
        "train.ipynb, cell 2, line 3: UserWarning: take care",
        "  warnings.warn('take care')",
        "train.ipynb, cell 3, line 5: DeprecationWarning: old",
        "  warnings.warn('old', DeprecationWarning)",
        "train.ipynb, cell 4, line 2: UserWarning: of this package",
        "  warn_user('of this package')",
    ]


def test_warnings_of_other_files_look_as_ever(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("import warnings\nwarnings.warn('elsewhere')\n")
    written = f"{tmp_path / 'other.py'}:2: UserWarning: elsewhere\n  warnings.warn('elsewhere')\n"
    assert stderr_of(tmp_path, "import other") == written


PRINTS = "    print('seen', message, os.path.basename(filename), file=sys.stderr)"
GIVES = "    return f'seen {message} {os.path.basename(filename)}\\n'"
CALLS = "    return 'seen ' + before(*args, **kwargs)"
SEEN = "seen take care train.py\n"
WARNED = "train.ipynb, cell 3, line 3: UserWarning: take care\n  warnings.warn('take care')\n"


@pytest.mark.parametrize(
    ("hook", "output"),
    [
        (f"def show(message, category, filename, *_):\n{PRINTS}\nwarnings.showwarning = show", SEEN),
        (f"def form(message, category, filename, *_):\n{GIVES}\nwarnings.formatwarning = form", SEEN),
        (
            f"before = warnings.formatwarning\ndef form(*args, **kwargs):\n{CALLS}\nwarnings.formatwarning = form",
            f"seen {WARNED}",
        ),
        (
            "import logging\nlogging.basicConfig(format='%(name)s %(message)s')\nlogging.captureWarnings(True)",
            f"py.warnings {WARNED}\n",
        ),
        ("warnings.simplefilter('ignore')", ""),
    ],
    ids=["showwarning", "formatwarning", "formatwarning that calls the one before", "logging", "a filter"],
)
def test_hooks_and_filters_of_the_person_s_own_go_on(hook: str, output: str, tmp_path: Path) -> None:
    assert stderr_of(tmp_path, f"import os, sys\n{hook}", WARNS) == output


def test_a_warning_that_is_made_an_error_ends_the_script_at_its_line(tmp_path: Path) -> None:
    output = stderr_of(tmp_path, "warnings.resetwarnings()\nwarnings.simplefilter('error')", WARNS)
    assert "  train.ipynb, cell 3, line 3, in careful\n" in output
    assert output.endswith("UserWarning: take care\n")
    assert "train.py" not in output


def test_what_collects_warnings_collects_them(tmp_path: Path) -> None:
    cell = f"import pytest, sys\n{WARNS[:-10]}with pytest.warns(UserWarning, match='care') as found:\n    careful()\n"
    assert stderr_of(tmp_path, f"{cell}print(len(found), found[0].lineno > 10, file=sys.stderr)") == "1 True\n"


def test_where_a_file_was_opened_that_nobody_closed_is_reported_in_the_same_words(tmp_path: Path) -> None:
    cell = "def left_open():\n    open(os.devnull)\n\nimport os\nleft_open()\nx = 1"
    output = stderr_of(tmp_path, cell, flags=("-X", "tracemalloc=5"))
    assert output.startswith("train.ipynb, cell 2, line 2: ResourceWarning: unclosed file")
    assert output.endswith(
        "Object allocated at (most recent call last):\n"
        "  train.ipynb, cell 2, line 5\n    left_open()\n  train.ipynb, cell 2, line 2\n    open(os.devnull)\n"
    )


def test_a_second_script_in_the_same_process_names_its_own_lines(tmp_path: Path) -> None:
    second = exported(tmp_path, "import warnings", "\nwarnings.warn('second')", name="second.ipynb")
    output = stderr_of(tmp_path, f"import runpy\nrunpy.run_path({os.fspath(second)!r}, run_name='__main__')", WARNS)
    assert output.splitlines()[::2] == [
        "second.ipynb, cell 2, line 2: UserWarning: second",
        "train.ipynb, cell 3, line 3: UserWarning: take care",
    ]
