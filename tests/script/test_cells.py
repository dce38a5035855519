"""What a notebook shows is text outside of one, the same text that IPython writes, and what it awaits runs on one loop."""

import builtins
import collections

import pytest

from accelerate_nb.script.cells import display, shown
from tests.processes import python


@pytest.fixture(autouse=True)
def _outside_of_notebooks(monkeypatch):
    monkeypatch.delattr(builtins, "display", raising=False)


VALUES = [
    *(1, -2.5, True, "it's", b"x", 1j, ...),
    *([1, "a", None], (1,), (), {"a": [1, (2, 3)]}, {3, 1, 2}, list(range(100))),
    *({"key " * 5: "value " * 9, "other": ["x" * 40, "y" * 40]}, "a long text " * 20, "two\nlines"),
    *(int, len, range(3), collections.Counter("abca"), collections.OrderedDict(a=1), ValueError("x")),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_values_are_written_as_ipython_writes_them(value, capsys):
    from IPython.lib.pretty import pretty

    display(value)
    assert capsys.readouterr().out == f"{pretty(value)}\n"


def test_a_value_is_shown_and_none_is_not(capsys):
    shown(3)
    shown(None)
    shown("a")
    assert capsys.readouterr().out == "3\n'a'\n"


def test_display_shows_each_of_its_objects_and_again(capsys):
    assert display(1, "a", metadata={}) is None
    assert capsys.readouterr().out == "1\n'a'\n"
    handle = display("loading", display_id=True)
    handle.update("done")
    assert capsys.readouterr().out == "'loading'\n'done'\n"


def test_what_draws_is_its_text_or_a_line_that_names_it(capsys):
    from IPython.display import HTML, Markdown
    from matplotlib.figure import Figure

    display(Markdown("# Title"), HTML("<b>x</b>"), Figure(figsize=(2, 1)))
    written = "# Title\n<IPython.core.display.HTML object>\n<Figure size 200x100 with 0 Axes>\n"
    assert capsys.readouterr().out == written


def test_where_something_else_shows_it_does(monkeypatch, capsys):
    seen: list[object] = []
    monkeypatch.setattr(builtins, "display", lambda *objects, **_: seen.extend(objects), raising=False)
    shown(3)
    display("a")
    assert seen == [3, "a"]
    assert capsys.readouterr().out == ""


def test_numbers_and_texts_need_no_ipython():
    program = "import sys\nfrom accelerate_nb.script.cells import shown\nshown([1, {'a': 2.5}])\nprint('IPython' in sys.modules)"
    assert python("-c", program, check=True).stdout == "[1, {'a': 2.5}]\nFalse\n"


def test_what_still_runs_at_the_end_is_cancelled_without_a_warning():
    program = """
import asyncio
from accelerate_nb.script.cells import wait

async def forever():
    try:
        await asyncio.Event().wait()
    finally:
        print("cancelled")

async def cell():
    global task
    task = asyncio.create_task(forever())
    await asyncio.sleep(0)

wait(cell())
print("the end")
"""
    done = python("-W", "error", "-c", program)
    assert (done.stdout, done.stderr, done.returncode) == ("the end\ncancelled\n", "", 0)
