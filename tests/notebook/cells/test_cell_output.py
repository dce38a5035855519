"""What a session's cell shows: equal output once, labelled, in order, bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate_nb.events.folding import WINDOW
from accelerate_nb.events.model import Display, LogLine, Metric, Quiet
from accelerate_nb.events.view import RunView
from accelerate_nb.launching.cell_run import CellEnd
from accelerate_nb.notebook.cells.output import CellOutput, results_of
from accelerate_nb.notebook.screens import Bound, Cell
from tests.notebook.paper import Paper

FOLDER = Path("/runs/1")


class Desk:
    """A cell's output on paper, with a clock that is moved by hand."""

    def __init__(self, size=2, bound=Bound(), view=None, **options):  # noqa: B008
        self.now = 100.0
        self.paper = Paper(bound)
        self.view = view or RunView(size)
        self.output = CellOutput(
            self.paper,
            self.view,
            **{"ranks": range(size), "size": size, "folder": FOLDER, "clock": lambda: self.now, **options},
        )

    def feed(self, *events):
        for event in events:
            self.view.apply(event)

    def refresh(self, seconds=1.0):
        self.now += seconds
        self.output.refresh()
        return [line.text for line in self.paper.lines]

    def close(self):
        self.output.closed()
        return [line.text for line in self.paper.lines]


def line(text, rank=0, stream="stdout", open=False):
    return LogLine(rank, stream, text, 0.0, open)


def rich(rank, html):
    return Display(rank, {"text/html": html, "text/plain": "table"}, {}, 0.0)


def test_a_quiet_cell_shows_nothing():
    desk = Desk()
    desk.feed(Metric(0, "loss", 1.0, 0, 0.0))
    desk.refresh()
    assert desk.close() == []
    assert desk.paper.open == []


def test_a_silence_is_told_of_once_and_again_when_it_has_doubled():
    desk = Desk()
    said = ["... Nothing has come.", "... rank 0 waits"]
    desk.feed(Quiet(60.0, "Nothing has come.\nrank 0 waits", 0.0))
    assert desk.refresh() == desk.refresh() == said
    desk.feed(Quiet(120.0, "Still nothing.", 0.0))
    assert desk.refresh() == [*said, "... Still nothing."]
    desk.feed(Quiet(0.0, "", 0.0))
    desk.refresh()
    desk.feed(Quiet(60.0, "Again.", 0.0))
    assert desk.refresh()[-1] == "... Again."


def test_equal_lines_stand_once_and_the_text_of_all_begins_in_one_column():
    desk = Desk(size=3)
    desk.feed(*(line("hello", rank) for rank in range(3)), line("alone", 1), line("", 2))
    assert desk.close() == ["[0-2] hello", "[1]   alone", "[2]   "]


def test_what_all_have_written_is_there_at_the_next_look():
    desk = Desk()
    desk.feed(line("a", 0), line("a", 1))
    assert desk.refresh(0.1) == ["[0-1] a"]


def test_what_one_rank_writes_waits_for_the_window():
    desk = Desk()
    desk.feed(line("a", 0))
    assert desk.refresh(0.01) == []
    assert desk.refresh(WINDOW + 0.1) == ["[0]   a"]


def test_each_stream_stays_what_it_was():
    desk = Desk()
    desk.feed(line("a"), line("b", stream="stderr"))
    desk.close()
    assert [one.stream for one in desk.paper.lines] == ["stdout", "stderr"]


def test_a_cell_begins_where_the_one_before_ended():
    first = Desk()
    first.feed(line("a"))
    first.close()
    second = Desk(view=first.view, cursor=first.output.cursor)
    second.feed(line("b"))
    assert second.close() == ["[0]   b"]


def test_equal_results_are_folded_and_the_first_ranks_tables_are_shown():
    desk = Desk()
    for rank in range(2):
        desk.feed(Display(rank, {"text/plain": "3\n4"}, {}, 0.0), rich(rank, f"<b>{rank}"), rich(rank, "<i>"))
    assert desk.close() == [
        "[0-1] 3",
        "      4",
        "[0]",
        "<shown>",
        "[0-1]",
        "<shown>",
        "... displays of rank 1 are left out; --displays all shows them ...",
    ]
    assert [data["text/html"] for data in desk.paper.shown] == ["<b>0", "<i>"]


def test_values_of_the_last_expression_come_last():
    desk = Desk()
    desk.feed(line("a", 0), line("late", 1))
    ends = [
        CellEnd(0, True, 0.1, {"text/plain": "3"}),
        CellEnd(1, True, 0.1, {"text/plain": "3"}),
        CellEnd(2, True, 0.1),
    ]
    desk.output.closed(results_of(ends))
    assert [one.text for one in desk.paper.lines] == ["[0]   a", "[1]   late", "[0-1] 3"]


def test_an_equal_display_that_comes_late_is_not_missed():
    desk = Desk()
    desk.feed(rich(0, "<b>"))
    desk.refresh(1.0)
    desk.refresh(1.0)
    desk.feed(rich(1, "<b>"))
    assert desk.close() == ["[0]", "<shown>"]


def test_an_update_takes_the_place_of_what_was_shown():
    desk = Desk()
    desk.feed(
        Display(0, {"text/html": "<i>1</i>"}, {}, 0.0, "bar"), Display(1, {"text/html": "<i>1</i>"}, {}, 0.0, "bar")
    )
    for number in range(2, 9):
        for rank in (0, 1):
            desk.feed(Display(rank, {"text/html": f"<i>{number}</i>"}, {}, 0.0, "bar", update=True))
    desk.close()
    assert desk.paper.names == [("1-0-bar", False), ("1-0-bar", True)]
    assert desk.paper.shown[-1] == {"text/html": "<i>8</i>"}


def test_displays_of_every_rank_can_be_asked_for():
    desk = Desk(displays="all")
    desk.feed(rich(0, "<b>"), rich(1, "<i>"))
    assert desk.close() == ["[0]", "<shown>", "[1]", "<shown>"]


def test_a_cell_on_some_ranks_is_led_by_the_first_of_them():
    desk = Desk(size=4, ranks=(2, 3))
    desk.feed(rich(3, "<i>"), rich(2, "<b>"), line("a", 2), line("a", 3))
    assert desk.close()[:3] == ["[2]", "<shown>", "[2-3] a"]


def test_equal_bars_are_one_line_that_updates():
    desk = Desk()
    for percent in (10, 20, 30):
        for rank in range(2):
            desk.feed(line(f"{percent}%", rank, "stderr", open=True))
        desk.refresh()
    assert desk.paper.open == ["[0-1] 30%"]
    desk.feed(line("40%", 1, "stderr", open=True))
    desk.refresh()
    assert desk.paper.open == ["[0]   30%", "[1]   40%"]
    assert desk.close() == ["[0]   30%", "[1]   40%"]
    assert desk.paper.open == []


def test_a_prefix_template_is_filled_in():
    desk = Desk(prefix_template="<${rank}> ")
    desk.feed(line("a", 0), line("a", 1), line("b", 1))
    assert desk.close() == ["<0-1> a", "<1> b"]


def test_a_long_cell_is_bounded_and_ends_with_its_last_lines():
    desk = Desk(bound=Bound(lines=3, tail_lines=2, tail_size=10_000))
    desk.feed(*(line(str(number)) for number in range(10)))
    assert desk.close() == [
        "[0]   0",
        "[0]   1",
        "[0]   2",
        "... a cell holds no more; all lines of each rank are in /runs/1 ...",
        "... 5 lines are only in /runs/1 ...",
        "[0]   8",
        "[0]   9",
    ]


def test_lines_that_came_too_fast_are_counted():
    desk = Desk(view=RunView(2, backlog=10))
    desk.feed(*(line(str(number)) for number in range(15)))
    assert desk.close()[0] == "... 5 lines came faster than they could be shown; they are in /runs/1 ..."


@pytest.mark.parametrize("text", ["x" * 5000, "\x1b[31m\x1b[0m" * 400, "ä€😀" * 700, ""])
def test_whatever_ranks_write_a_cell_stays_under_a_megabyte(text):
    desk = Desk(size=4, bound=Cell.bound)
    for number in range(6_000):
        desk.feed(line(text, number % 4, "stderr" if number % 3 else "stdout"))
    assert sum(len(one.encode()) for one in desk.close()) < 700_000
