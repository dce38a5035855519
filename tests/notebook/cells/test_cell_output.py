"""What a session's cell shows: equal output once, labelled, in order, bounded."""

from pathlib import Path
from types import SimpleNamespace

from accelerate_nb.events.event_types import Display, Progress
from accelerate_nb.events.run_state import RunState
from accelerate_nb.launching.run import LaunchFacts, Run
from accelerate_nb.launching.session import CellControl, CellResult
from accelerate_nb.notebook.cells.session_manager import CellOutput
from tests.notebook import paper
from tests.notebook.paper import Paper, line


class Desk(paper.Desk):
    def __init__(self, size=2, *, at=None, view=None, ranks=None, cursor=0, displays="main", outlives_wait=False):
        super().__init__(at or Paper(), view or RunState(size))
        ranks = tuple(ranks or range(size))
        settings = {"ranks": ranks, "is_cell": True, "outlives_wait": outlives_wait}
        facts = LaunchFacts("Cell In[1]", "", Path("/runs/1"), 0.0, "all", 0.0, **settings)
        tasks = SimpleNamespace(conductor=SimpleNamespace(view=self.view, log_file=None), stacks=None)
        self.control = CellControl(tasks, facts, 1, cursor, runs_code=True)
        self.front_end = CellOutput(lambda: self.paper, ranks, None, displays, clock=lambda: self.now)
        self.run = Run(self.control, self.front_end)
        self.front_end.opened(self.run)

    def close(self, *results):
        self.control.ended = {rank: CellResult(rank) for rank in self.control.facts.ranks}
        self.control.ended |= {result.rank: result for result in results}
        self.control.finish(None)
        self.front_end.closed()
        return self.paper.texts


def rich(rank, html):
    return Display(rank, {"text/html": html, "text/plain": "table"}, {}, 0.0)


def test_equal_lines_stand_once_and_the_text_of_all_begins_in_one_column():
    desk = Desk(size=3).feed(*(line("hello", rank) for rank in range(3)), line("alone", 1), line("", 2))
    assert desk.close() == ["[0-2] hello", "[1]   alone", "[2]   "]


def test_a_cell_begins_where_the_one_before_ended():
    first = Desk()
    first.feed(line("a"))
    first.close()
    first.feed(line("late"))
    second = Desk(view=first.view, cursor=first.view.end_slice(first.control.view) - 1)
    second.feed(line("b"))
    assert second.close() == ["[0]   late", "[0]   b"]


def test_equal_results_are_folded_and_the_first_ranks_tables_are_shown():
    desk = Desk()
    for rank in range(2):
        desk.feed(Display(rank, {"text/plain": "3\n4"}, {}, 0.0), rich(rank, f"<b>{rank}"), rich(rank, "<i>"))
    *texts, last = desk.close()
    assert texts == ["[0-1] 3", "      4", "[0]", "<shown>", "[0-1]", "<shown>"]
    assert last == "... displays of rank 1 are left out; --displays all shows them ..."
    assert [data["text/html"] for data in desk.paper.shown] == ["<b>0", "<i>"]


def test_values_of_the_last_expression_come_last():
    desk = Desk().feed(line("a", 0), line("late", 1))
    results = [CellResult(rank, result={"text/plain": "3"} if rank < 2 else None) for rank in range(3)]
    assert desk.close(*results) == ["[0]   a", "[1]   late", "[0-1] 3"]


def test_an_equal_display_that_comes_late_is_not_missed():
    desk = Desk().feed(rich(0, "<b>"))
    for _ in range(2):
        desk.refresh()
    desk.feed(rich(1, "<b>"))
    assert desk.close() == ["[0]", "<shown>"]


def test_an_update_takes_the_place_of_what_was_shown():
    desk = Desk()
    for number in range(1, 9):
        for rank in (0, 1):
            desk.feed(Display(rank, {"text/html": f"<i>{number}</i>"}, {}, 0.0, "bar", update=number > 1))
    desk.close()
    assert desk.paper.names == [("1-0-bar", False), ("1-0-bar", True)]
    assert desk.paper.shown[-1] == {"text/html": "<i>8</i>"}


def test_displays_of_every_rank_can_be_requested():
    assert Desk(displays="all").feed(rich(0, "<b>"), rich(1, "<i>")).close() == ["[0]", "<shown>", "[1]", "<shown>"]


def test_a_cell_on_some_ranks_is_led_by_the_first_of_them():
    desk = Desk(size=4, ranks=(2, 3)).feed(rich(3, "<i>"), rich(2, "<b>"), line("a", 2), line("a", 3))
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


def bar(rank, done, label="train", closed=False):
    return Progress(rank, label, done, 10, 0.0, rate=2.0, closed=closed, bar="tqdm 0")


def test_bars_move_below_a_cell_and_are_gone_when_they_end():
    desk = Desk(size=3, ranks=(0, 1)).feed(bar(0, 5), bar(1, 5), bar(2, 1))
    desk.refresh()
    assert desk.paper.open == ["[0-1] train ██████░░░░░░ 5/10 2 it/s 00:02"]
    desk.feed(bar(0, 10, closed=True))
    desk.refresh()
    assert desk.paper.open == ["[1]   train ██████░░░░░░ 5/10 2 it/s 00:02"]
    assert desk.close() == []
