"""A script changes between the notebook's random numbers and the ranks' where both are drawn, and nowhere else."""

from __future__ import annotations

import ast

import pytest

from accelerate_nb.export.rank_cells.rng_streams import Whose, may_draw, turns
from tests.export.making import script


@pytest.mark.parametrize(
    "source",
    [
        "x = rand(2)",
        "for batch in loader: pass",
        "x = data[0]",
        "[x for x in loader]",
        "with a: pass",
        "@a\ndef f(): ...",
    ],
)
def test_what_runs_somebodys_code_may_draw(source: str) -> None:
    assert may_draw(ast.parse(source).body)


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "def f(x=1):\n    return rand(x)",
        "f = lambda: rand()",
        "x = push(x)\nprint(len(x), f'{y:.1f}')",
        "x[0] = 1",
        "class A:\n    def f(self): return rand()",
    ],
)
def test_what_only_defines_or_prints_draws_nothing(source: str) -> None:
    assert not may_draw(ast.parse(source).body)


def turned(first: int, *cells: tuple[Whose, str]) -> dict[int, Whose]:
    """Where numbers change in these cells; the session begins with the cell `first`."""
    trees = {number: ast.parse(source) for number, (_, source) in enumerate(cells, start=1)}
    ranks = {number: whose for number, (whose, _) in enumerate(cells, start=1) if whose != "notebook"}
    return turns(trees, ranks, first)


def test_cells_of_ranks_with_nothing_drawn_between_them_change_nothing() -> None:
    assert turned(2, ("notebook", "f()"), ("ranks", "f()"), ("notebook", "print(x)"), ("ranks", "f()")) == {}
    assert turned(1, ("notebook", "run(f)"), ("notebook", "f()")) == {}


def test_numbers_change_where_the_other_draws() -> None:
    cells: list[tuple[Whose, str]] = [
        ("ranks", "x = 1"),
        ("ranks", "f()"),
        ("notebook", "print(x)"),
        ("notebook", "f()"),
        ("notebook", "f()"),
        ("both", "f()"),
        ("both", "f()"),
        ("both", "def f(): ..."),
        ("ranks", "f()"),
    ]
    # a session that begins with a cell begins there, whatever the cell does
    assert turned(1, *cells) == {1: "ranks", 4: "notebook", 6: "both", 7: "both", 9: "ranks"}


def test_a_restart_that_starts_the_session_reports_it_in_its_place(tmp_path) -> None:
    cells = ["x = 1\n%accelerate restart -n 2", "f()", "%%accelerate\nf()", "%accelerate restart -n 2"]
    text = script(tmp_path, *cells[:3]).text
    assert "    session_begins()  # %accelerate restart -n 2\n" in text
    assert text.index("session_begins()  #") < text.index("on_ranks()  # +")
