"""The notebook's lines travel, and are known where they arrive."""

from __future__ import annotations

import json
import linecache
import traceback

import pytest

from accelerate_nb.sources.cells import CellSources, current_sources


@pytest.fixture
def cell():
    name, lines = "<cell of a test>", ["def f():\n", "    raise ValueError('here')\n"]
    linecache.cache[name] = (10, None, lines, name)
    yield name, lines
    linecache.cache.pop(name, None)


def test_cells_travel_as_plain_values_and_show_up_in_tracebacks(cell):
    name, lines = cell
    plain = json.loads(json.dumps(current_sources().to_plain()))
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


def test_files_stay_where_they_are():
    linecache.getline(__file__, 1)
    assert __file__ not in current_sources().lines


def test_a_place_is_named_as_a_person_would():
    sources = CellSources({"/tmp/ipykernel_1/2.py": ["a\n"], "<string>": ["b\n"]}, {"/tmp/ipykernel_1/2.py": 3})
    assert sources.location("/tmp/ipykernel_1/2.py", 7) == "Cell In[3], line 7"
    assert sources.location("<string>", 1) == "a cell, line 1"
    assert sources.location("train.py", 2) == 'File "train.py", line 2'
