"""A line of a script is a line of a cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate_nb.sources.cells import CellSources, cell_line, table
from tests.export.making import code, exported, markdown, notebook, script

CELLS = [
    "import os\n\nprint(\n    'a'\n)",
    markdown("# Title\n\n    code"),
    "\n\nx = 1  # +\ntext = '''\n  # %% [9] other.ipynb\n'''\nx",
    code("1 / 0", "raises-exception"),
    "async def f():\n    return 1\n\n\ny: int = await f()\n\ny",
    code("rate = 1", "parameters"),
]
SOURCES = [
    cell if isinstance(cell, str) else cell["source"][0]
    for cell in CELLS
    if not isinstance(cell, dict) or "outputs" in cell
]


def test_every_line_of_every_cell_is_found_and_nothing_else(tmp_path):
    lines = script(tmp_path, *CELLS).text.split("\n")
    found = {(origin.cell, origin.line): lines[number - 1] for number, origin in table(lines).items()}
    for cell, source in enumerate(SOURCES, start=1):
        for line, text in enumerate(source.split("\n"), start=1):
            script_line = found[cell, line].strip()
            bare = text.strip().replace(": int", "")
            assert script_line in (bare, f"# {bare}", f"shown({bare})"), (cell, line)


def test_a_place_reads_as_a_person_writes_it(tmp_path):
    path = exported(tmp_path, *CELLS)
    number = path.read_text().split("\n").index("    shown(y)") + 1
    assert str(cell_line(str(path), number)) == "train.ipynb, cell 4, line 7"
    assert cell_line(str(path), 1) is None
    assert cell_line(str(path), number + 1) is None  # what waits for the cell


def test_other_files_have_no_places(tmp_path):
    (tmp_path / "a.py").write_text("x\n# %% [1] a.ipynb\ny\n")
    assert cell_line(str(tmp_path / "a.py"), 3) is None
    assert cell_line(str(tmp_path / "none.py"), 3) is None
    assert cell_line(__file__, 3) is None
    assert table([]) == {}


def test_a_worker_names_the_cells_of_a_script(tmp_path):
    path = str(exported(tmp_path, "x = 1", "y = 2"))
    line = Path(path).read_text().split("\n").index("y = 2") + 1
    assert CellSources({}, {}).location(path, line) == "train.ipynb, cell 2, line 1"
    assert CellSources({}, {}).location(path, 2) == f'File "{path}", line 2'


@pytest.mark.parametrize("name", ["a b.ipynb", "ü [1].ipynb", "x\ny.ipynb", "a # +.ipynb"])
def test_any_name_of_a_notebook_is_kept(tmp_path, name):
    text = script(tmp_path, "x = 1", "y = 2", name=name).text.split("\n")
    line = text.index("y = 2") + 1
    assert str(table(text)[line]) == f"{name.replace(chr(10), '?')}, cell 2, line 1"
    assert notebook(tmp_path / name, "x").exists()
