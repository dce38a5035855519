"""A notebook's cells: every format of Jupyter's, and one clear line for what is none."""

import json
from pathlib import Path

import nbformat
import pytest

from accelerate_nb.errors import ConfigurationError, ExportError
from accelerate_nb.export.notebook import NotebookCell, read
from tests.export.making import code, markdown, notebook

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_cells_have_the_numbers_that_run_all_gives_them(tmp_path):
    cells = ["x = 1", markdown("hello"), "", " \n ", code("y = 2", "slow"), {"cell_type": "raw"}]
    found = read(notebook(tmp_path / "a.ipynb", *cells)).cells
    empty = [("markdown", None), ("code", None), ("code", None)]
    assert [(cell.kind, cell.number) for cell in found] == [("code", 1), *empty, ("code", 2), ("raw", None)]
    assert found[4] == NotebookCell("code", "y = 2", 2, frozenset({"slow"}))


@pytest.mark.parametrize("source", ["a\r\nb\r\nc", ["a\r\n", "b\r\n", "c"], "a\rb\rc", ["a\nb\n", "c"]])
def test_lines_end_in_one_way_whatever_the_system(tmp_path, source):
    path = notebook(tmp_path / "a.ipynb", {"cell_type": "code", "source": source})
    assert read(path).cells[0].source == "a\nb\nc"


def test_a_mark_of_byte_order_and_any_letters_are_read(tmp_path):
    path = notebook(tmp_path / "a.ipynb", "naïve = '日本 \U0001f600'")
    path.write_text("\ufeff" + path.read_text(), encoding="utf-8")
    assert read(path).cells[0].source == "naïve = '日本 \U0001f600'"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_those_that_nbformat_reads(path):
    theirs = nbformat.read(path, as_version=4).cells
    assert [(cell.kind, cell.source) for cell in read(path).cells] == [(cell.cell_type, cell.source) for cell in theirs]


@pytest.mark.parametrize("version", [2, 3])
def test_old_formats_are_read_as_nbformat_reads_them(tmp_path, version):
    old = nbformat.versions[version]
    cells = [old.new_code_cell(input="x = 1\nx"), old.new_text_cell("markdown", source="some *text*")]
    cells += [old.new_heading_cell(source="Title", level=2)] if version == 3 else []
    content = old.new_notebook(worksheets=[old.new_worksheet(cells=cells)])
    (tmp_path / "old.ipynb").write_text(json.dumps(content))
    theirs = nbformat.convert(content, 4).cells
    found = read(tmp_path / "old.ipynb").cells
    assert [(cell.kind, cell.source) for cell in found] == [(cell.cell_type, cell.source) for cell in theirs]
    assert found[0].number == 1


def test_an_old_notebook_needs_no_metadata(tmp_path):
    content = {"nbformat": 3, "worksheets": [{"cells": [{"cell_type": "code", "input": ["x = 1\n", "x"]}]}]}
    (tmp_path / "old.ipynb").write_text(json.dumps(content))
    assert [cell.source for cell in read(tmp_path / "old.ipynb").cells] == ["x = 1\nx"]


@pytest.mark.parametrize("metadata", [None, [], {"kernelspec": None}, {"kernelspec": 3, "language_info": "x"}, {}])
def test_broken_metadata_hides_no_cell(tmp_path, metadata):
    cell = {"cell_type": "code", "source": "x", "metadata": metadata, "id": 7}
    tagged = {"cell_type": "code", "source": "y", "metadata": {"tags": "parameters"}}
    content = {"nbformat": 4, "metadata": metadata, "cells": [cell, tagged, 3, {}]}
    (tmp_path / "a.ipynb").write_text(json.dumps(content))
    assert [cell.source for cell in read(tmp_path / "a.ipynb").cells] == ["x", "y", "", ""]


@pytest.mark.parametrize(
    "metadata",
    [
        {"language_info": {"name": "R"}},
        {"language_info": {}, "kernelspec": {"name": "ir", "display_name": "R"}},
        {"language_info": {}, "kernelspec": {"name": "x", "language": "R"}},
    ],
)
def test_another_language_is_named(tmp_path, metadata):
    with pytest.raises(ExportError, match=r"a notebook in R\. Only notebooks in Python"):
        read(notebook(tmp_path / "a.ipynb", "x", **metadata))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("print('hello')", "holds no JSON"),
        ("", "holds no JSON"),
        ("[1, 2]", "lacks a notebook's cells"),
        ('{"cells": []}', "lacks a notebook's cells"),
        ('{"nbformat": 4, "cells": 3}', "lacks a notebook's cells"),
        ('{"nbformat": 9, "cells": []}', "format 9"),
        ('{"nbformat": 3, "worksheets": 3}', "lacks a notebook's cells"),
        ("[" * 100_000, "holds no JSON"),
        (b"\xff\xfe\x00", "holds no JSON"),
    ],
)
def test_what_is_no_notebook_is_reported_in_one_line(tmp_path, content, message):
    path = tmp_path / "a.ipynb"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ExportError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_and_an_unreadable_file_are_reported(tmp_path):
    notebook(tmp_path / "train.ipynb", "x")
    with pytest.raises(ConfigurationError, match=r"no such file\. Did you mean .*train\.ipynb\?"):
        read(tmp_path / "train")
    (tmp_path / "locked.ipynb").symlink_to(tmp_path / "locked.ipynb")
    with pytest.raises(ExportError, match="can't be: "):
        read(tmp_path / "locked.ipynb")
