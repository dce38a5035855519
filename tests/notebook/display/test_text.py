"""The plain-text front end: labelled, in order, bounded, and quiet where there is nothing to say."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from accelerate_nb.events.event_types import Display
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.display.text import TextFrontEnd
from accelerate_nb.notebook.display.text_output import CellSink, OutputLimits
from tests.notebook import paper
from tests.notebook.paper import Paper, line


class Desk(paper.Desk):
    def __init__(self, template="[$rank] ", bound=OutputLimits(), **sizes):  # noqa: B008
        super().__init__(Paper(bound), RunState(**sizes))
        self.front_end = TextFrontEnd(lambda: self.paper, template, clock=lambda: self.now)
        self.open()

    def open(self):
        self.front_end.opened(SimpleNamespace(view=self.view, folder=Path("/runs/1")))
        return self

    def close(self):
        self.front_end.closed()
        return self.paper.texts


def test_lines_stand_behind_their_ranks():
    assert Desk().feed(line("a", 1), line("b", 0), line("", 10)).close() == ["[1] a", "[0] b", "[10] "]


@pytest.mark.parametrize(
    ("template", "label"),
    [("[${role_name}${local_rank}]:", "[default3]:"), ("$rank> ", "3> "), ("", ""), ("${unknown} $", "${unknown} $")],
)
def test_a_prefix_template_is_filled_in(template, label):
    assert Desk(template).feed(line("a", 3)).close() == [f"{label}a"]


def test_lines_are_written_a_few_times_a_second():
    desk = Desk()
    for i in range(1000):
        desk.feed(line(str(i)))
        desk.now += 0.001
        desk.front_end.refresh()
    assert 1 < desk.paper.writes <= 10
    assert desk.close() == [f"[0] {i}" for i in range(1000)]


def test_progress_is_one_line_a_rank_that_updates():
    desk = Desk()
    for percent in (10, 20, 30):
        desk.feed(line(f"{percent}%", 0, "stderr", open=True), line(f"{percent + 1}%", 1, "stderr", open=True))
        desk.refresh()
    assert desk.paper.open == ["[0] 30%", "[1] 31%"]
    assert desk.paper.texts == []
    desk.feed(line("100%", 0, "stderr")).refresh()
    assert desk.paper.open == ["[1] 31%"]
    assert desk.paper.texts == ["[0] 100%"]


def test_a_line_that_only_waits_for_its_end_is_no_progress():
    desk = Desk().feed(line("loading...", open=True)).refresh().feed(line("loading... done")).refresh()
    assert not any(desk.paper.opened)
    assert desk.close() == ["[0] loading... done"]


def test_a_hundred_open_lines_are_summed_up():
    desk = Desk().feed(*(line("1%", rank, open=True) for rank in range(100))).refresh().refresh()
    assert len(desk.paper.open) == 33
    assert desk.paper.open[-1] == "... and 68 more"


def test_colours_pass_and_end_with_their_line():
    desk = Desk().feed(line("\x1b[31mred"), line("\x1b[1;32mgreen\x1b[0m"))
    assert desk.close() == ["[0] \x1b[31mred\x1b[0m", "[0] \x1b[1;32mgreen\x1b[0m"]


def test_what_would_move_the_cursor_is_left_out():
    for noise in ("\x1b[A", "\x1b[2K", "\x1b[?25l", "\x1b]0;title\x07", "\x07", "\x08", "\x00", "\x1b7", "\x1b(B"):
        assert Desk().feed(line(noise), line(f"a{noise}b\tc")).close() == ["[0] ab\tc"]


def test_long_runs_are_bounded_and_end_with_their_last_lines():
    desk = Desk(bound=OutputLimits(lines=10, tail_lines=3, tail_size=10_000), size=2)
    for begin in (0, 100):
        desk.refresh().feed(*(line(f"{i:04}", i % 2) for i in range(begin, begin + 100)))
    texts = desk.close()
    assert texts[:10] == [f"[{i % 2}] {i:04}" for i in range(10)]
    assert "all lines of each rank are in /runs/1" in texts[10]
    assert texts[11:] == [
        "[0] ... 92 lines are only in /runs/1 ...",
        *(f"[0] {i:04}" for i in (194, 196, 198)),
        "[1] ... 92 lines are only in /runs/1 ...",
        *(f"[1] {i:04}" for i in (195, 197, 199)),
    ]


def test_a_second_wait_goes_on_where_the_first_ended_with_room_of_its_own():
    desk = Desk(bound=OutputLimits(lines=3, tail_lines=1, tail_size=10_000))
    desk.feed(*(line(str(i)) for i in range(6)))
    first = list(desk.close())
    assert first[-2:] == ["[0] ... 2 lines are only in /runs/1 ...", "[0] 5"]
    second = list(desk.open().feed(line("6"), line("7")).close())
    assert second[len(first) :] == ["[0] 6", "[0] 7"]
    third = desk.open().feed(*(line(str(i)) for i in range(8, 14))).close()
    assert third[len(second) :][-2:] == ["[0] ... 2 lines are only in /runs/1 ...", "[0] 13"]


def test_a_rank_whose_lines_were_all_written_is_not_repeated():
    desk = Desk(bound=OutputLimits(lines=10, tail_lines=3, tail_size=10_000), size=2)
    desk.feed(line("alone", 1), *(line(str(i), 0) for i in range(100)))
    assert [text for text in desk.close() if text.startswith("[1]")] == ["[1] alone"]


def test_lines_that_came_too_fast_are_counted():
    desk = Desk(backlog=10).feed(*(line(str(i)) for i in range(1010)))
    texts = desk.close()
    assert texts[0] == "... 1,000 lines came faster than they could be shown; they are in /runs/1 ..."
    assert texts[1:] == [f"[0] {i}" for i in range(1000, 1010)]


def test_a_very_long_line_is_cut_for_a_cell_only():
    short, long = Desk(bound=OutputLimits(width=100)), Desk()
    for desk in (short, long):
        desk.feed(line("x" * 1_000_000))
    assert short.close() == [f"[0] {'x' * 100} ... (999,900 more characters are in the run's folder)"]
    assert len(long.close()[0]) == 1_000_004


@pytest.mark.parametrize("text", ["x" * 5000, "\x1b[31m\x1b[0m" * 400, "ä€😀" * 700, '"\\' * 1000, "", "ok"])
def test_whatever_ranks_write_a_cell_stays_under_a_megabyte(text):
    desk = Desk(bound=CellSink.bound, size=8)
    for i in range(20_000):
        desk.feed(line(text, i % 8, "stderr" if i % 3 else "stdout"))
    desk.close()
    assert saved_size(desk.paper.lines) < 1_000_000


def saved_size(lines):
    """The bytes of these lines in a notebook's file, every change of stream an output of its own."""
    outputs = [
        nbformat.v4.new_output("stream", name=stream, text="".join(f"{line.text}\n" for line in group))
        for stream, group in itertools.groupby(lines, key=lambda line: line.stream)
    ]
    cell = nbformat.v4.new_code_cell(outputs=outputs)
    return len(nbformat.writes(nbformat.v4.new_notebook(cells=[cell])).encode())


def test_something_rich_is_shown_in_its_place_under_its_rank():
    desk = Desk().feed(line("a"), Display(1, {"text/html": "<b>x</b>", "text/plain": "x"}, {}, 0.0), line("b"))
    assert desk.close() == ["[0] a", "[1]", "<shown>", "[0] b"]
    assert desk.paper.shown == [{"text/html": "<b>x</b>", "text/plain": "x"}]


@pytest.mark.parametrize("more", [{}, {"application/vnd.jupyter.widget-view+json": {}}])
def test_a_display_that_is_only_text_is_lines(more):
    assert Desk().feed(Display(2, {"text/plain": "a\nb", **more}, {}, 0.0)).close() == ["[2] a", "[2] b"]


def test_displays_are_bounded():
    desk = Desk(bound=OutputLimits(displays=3))
    desk.feed(*(Display(0, {"text/html": str(i)}, {}, 0.0) for i in range(10)))
    texts = desk.close()
    assert [data["text/html"] for data in desk.paper.shown] == ["0", "1", "2"]
    assert texts[-1] == "... a cell shows no more; the other displays are in /runs/1 ..."


def test_a_front_end_that_was_never_opened_is_quiet():
    paper = Paper()
    front_end = TextFrontEnd(lambda: paper)
    front_end.refresh()
    front_end.closed()
    assert paper.lines == []
