"""The source of a run: the cells or the script that it was launched with, as bounded plain text."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.launching.front_end import NoFrontEnd
from accelerate_nb.launching.launcher import prepare
from accelerate_nb.notebook.api import resolved
from accelerate_nb.sources import run_source
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.sources.run_source import SourcePart, as_text, keep_source, kept_source, parts_of, source_parts
from accelerate_nb.worker.program import Program, ScriptFile

DEFINITION = ["# my training\n", "def train(lr):\n", "    return lr\n"]
LAUNCH = ["launch(train, args=(0.1,))\n"]


@pytest.fixture
def cells() -> Iterator[tuple[Any, CellSources]]:
    """A function of a cell, and the notebook's sources."""
    lines = {"<cell 1>": DEFINITION, "<cell 2>": LAUNCH}
    for name, text in lines.items():
        linecache.cache[name] = (10, None, text, name)
    names: dict[str, Any] = {}
    exec(compile("".join(DEFINITION), "<cell 1>", "exec"), names)
    yield names["train"], CellSources(lines, {"<cell 1>": 1, "<cell 2>": 2})
    for name in lines:
        linecache.cache.pop(name, None)


def test_a_notebook_keeps_the_cells_of_the_function_and_of_the_launch(tmp_path: Path, cells: Any) -> None:
    train, sources = cells
    keep_source(tmp_path, train, (0.1,), sources)
    assert kept_source(tmp_path) == (
        SourcePart("arguments", "arguments of train", "lr = 0.1\n"),
        SourcePart("function", "Cell In[1]", "".join(DEFINITION)),
        SourcePart("launch", "Cell In[2]", "".join(LAUNCH)),
    )
    assert (tmp_path / "source.txt").read_text().startswith("# -------- arguments: arguments of train\nlr = 0.1\n")


def test_a_cell_that_defines_and_launches_is_kept_once(cells: Any) -> None:
    train, _ = cells
    alone = CellSources({"<cell 1>": DEFINITION}, {"<cell 1>": 1})
    assert [part.role for part in source_parts(train, (0.1,), alone)] == ["arguments", "function"]


def test_a_script_is_kept_with_its_path(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    program = Program(ScriptFile(str(script), "train.py"), ("--lr", "0.1"))
    assert source_parts(program, (), CellSources({}, {})) == (
        SourcePart("arguments", f"arguments of {program.__name__}", "--lr = 0.1\n"),
        SourcePart("script", "train.py", "print('hello')\n"),
    )


def test_long_source_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_source, "SIZE_LIMIT", 1000)
    text = as_text((SourcePart("launch", "Cell In[1]", "é = 1\n" * 1000),))
    assert 900 < len(text.encode()) <= 1000
    assert text.endswith("the rest was not kept\n")
    assert parts_of(text)[0].text.startswith("é = 1\n")


def test_a_folder_without_source_has_none(tmp_path: Path) -> None:
    assert kept_source(tmp_path) == ()


def test_a_launch_keeps_the_function_that_it_ran(tmp_path: Path) -> None:
    config = resolved({"num_processes": 1, "cpu": True, "engine": "inline", "folder": str(tmp_path)}, None)
    run = prepare(_hello, (), config, NoFrontEnd())
    run.start()
    (part,) = kept_source(run.folder)
    assert part.origin == __file__
    assert part.text.startswith("def _hello() -> str:")


def _hello() -> str:
    return "hello"
