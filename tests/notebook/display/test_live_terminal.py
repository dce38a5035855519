"""What a launch shows: lines alone in a pipe, lines and a board in a terminal, and at the end what became of it."""

import io
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pytest

from accelerate_nb.events.event_types import Display, Failure, HostSample, Metric, NodeRanks, Progress, StateChange
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.display.live_terminal import TerminalSink, board_lines
from accelerate_nb.notebook.display.text import TextFrontEnd, standard_sink
from accelerate_nb.notebook.display.text_output import LabelledLine
from tests.notebook.paper import line, on_screen

BEGAN = 1_700_000_000.0
# Whatever the clock says: what failed longer ago while others go on is told among the lines.
JUST_NOW = 1e12


class Screen(io.StringIO):
    """A stream that says that it is a terminal, or not."""

    def __init__(self, is_terminal):
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal


class Gone(io.StringIO):
    """A pipe that nobody reads."""

    def write(self, text):
        raise BrokenPipeError


class CapturedStreams:
    """A front end on two streams, with a clock that is moved by hand."""

    def __init__(self, size=2, out=False, err=False, environment=None, **options):
        self.out, self.err = (item if isinstance(item, io.StringIO) else Screen(item) for item in (out, err))
        self.now, self.stop_requests = 100.0, []
        self.view = RunState(size)
        variables = {"TERM": "xterm", **(environment or {})}
        self.front_end = TextFrontEnd(
            lambda: standard_sink(self.out, self.err, variables), is_command=True, clock=lambda: self.now, **options
        )
        facts = {"view": self.view, "folder": Path("/runs/1"), "name": "train.py", "why": "", "started": BEGAN}
        self.run = SimpleNamespace(**facts, record_problem="", request_stop=self.stop_requests.append)
        self.front_end.opened(self.run)

    def feed(self, *events, after=1.0):
        for event in events:
            self.view.apply(event)
        self.now += after
        self.front_end.refresh()
        return self

    def end(self, state="finished"):
        self.view.apply(StateChange(None, state, BEGAN + 75))
        self.front_end.closed()
        return self.out.getvalue().splitlines(), self.err.getvalue().splitlines()


def bar(rank, done, total=10):
    return Progress(rank, "train", done, total, BEGAN, rate=2.0)


# ----------------------------------------------------------------------------------------------------------------- in a pipe


def test_each_stream_holds_its_own_lines_with_their_ranks_and_standard_error_what_became_of_the_run():
    captured = CapturedStreams()
    for percent in (10, 20):
        captured.feed(line(f"{percent}%", 1, "stderr", open=True))  # what has not ended is in no pipe
    captured.feed(line("a"), line("b", 1, "stderr"), line("a", 1))
    out, err = captured.end()
    assert out == ["[0] a", "[1] a"]
    assert err == ["[1] b", "✔ train.py finished after 01:15", "All output: /runs/1"]


@pytest.mark.parametrize(("size", "only", "out"), [(1, None, ["0"]), (4, (2,), ["2"]), (4, (0, 2), ["[0] 0", "[2] 2"])])
def test_the_ranks_that_were_requested_are_shown_and_one_alone_without_a_label(size, only, out):
    captured = CapturedStreams(size, only_ranks=only)
    assert captured.feed(*(line(str(rank), rank) for rank in range(size))).end()[0] == out


def test_no_control_character_goes_into_a_pipe_and_seldom_where_the_ranks_are():
    captured = CapturedStreams().feed(line("\x1b[31mred\x1b[0m\tand \x1b[2K\x1b[A\x07moved"), line("\x1b[A"))
    for done in range(100):
        captured.feed(bar(0, done, 100))
    out, err = captured.end()
    assert out == ["[0] red\tand moved"]
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", "".join(err))
    bars = [item for item in err if "train █" in item or "train ░" in item]
    assert 2 <= len(bars) <= 4


def test_a_quiet_run_has_its_lines_and_nothing_else():
    captured = CapturedStreams(quiet=True).feed(line("a"), bar(0, 1), Metric(0, "loss", 1.0, 1, BEGAN))
    assert captured.end() == (["[0] a"], [])


@pytest.mark.parametrize("quiet", [False, True])
def test_the_last_line_is_what_is_not_kept_of_a_run_and_not_where_it_is(quiet):
    captured = CapturedStreams(quiet=quiet)
    captured.run.record_problem = "Not all of the run is kept."
    _, err = captured.end()
    assert err == [*([] if quiet else ["✔ train.py finished after 01:15"]), "Not all of the run is kept."]
    assert captured.front_end.shows_record_problem, "a warning says so too"


def test_whoever_reads_no_more_ends_the_run_quietly():
    captured = CapturedStreams(out=Gone()).feed(line("a"))
    captured.feed(line("b"))
    assert captured.stop_requests == ["interrupt"]
    with pytest.raises(BrokenPipeError):
        captured.end("stopped")


# ------------------------------------------------------------------------------------------------------------- in a terminal


class TwoStreams(CapturedStreams):
    """Both streams on one terminal."""

    def __init__(self, size=2, **more):
        terminal = Screen(is_terminal=True)
        super().__init__(size, terminal, terminal, **more)

    @property
    def screen(self):
        return on_screen(self.out.getvalue())


def test_equal_lines_of_all_ranks_stand_once_and_others_behind_their_ranks():
    captured = TwoStreams().feed(line("same", 0), line("same", 1), line("mine", 1))
    captured.feed()
    assert captured.screen[:2] == ["[0-1] same", "[1]   mine"]


def test_the_board_stands_below_the_lines_and_goes_in_the_end():
    captured = TwoStreams().feed(*(StateChange(rank, "running", BEGAN) for rank in (0, 1)), bar(0, 3), bar(1, 5))
    captured.feed(Metric(0, "loss", 0.5, 3, BEGAN), line("a"), HostSample(50.0, (1, 2), None, None, BEGAN))
    captured.feed()
    *lines, head, first, second, rest = captured.screen
    assert lines == ["[0]   a"]
    assert head.startswith("train.py  2 ranks")
    assert "CPU 50%" in head
    assert first == "[0] train ████░░░░░░░░ 3/10 2 it/s 00:03  loss 0.5"
    assert second == "[1] train ██████░░░░░░ 5/10 2 it/s 00:02"
    assert rest == ""
    captured.end()
    assert not any("2 ranks" in item for item in captured.screen)
    assert [item for item in captured.screen if "loss" in item] == ["  loss    min 0.5  max 0.5  last 0.5  step 3"]


def test_a_bar_is_drawn_once_and_other_open_lines_below_the_lines():
    captured = TwoStreams(1)
    drawn = line("train:  30%|███   | 3/10 [00:01<00:03, 2.00it/s]", 0, "stderr", open=True)
    captured.feed(StateChange(0, "running", BEGAN))
    for _ in range(3):
        captured.feed(bar(0, 3), drawn, line("Downloading 40%", open=True))
    assert [item for item in captured.screen if "3/10" in item] == ["[0] train ████░░░░░░░░ 3/10 2 it/s 00:03"]
    assert "Downloading 40%" in captured.screen


def test_errors_and_warnings_have_their_colours_in_a_terminal_and_none_in_a_pipe():
    meanings = {"ERROR:root:wrong": "error", "WARNING:root:slow": "warning", "100%|##| 3/3": "bar"}
    events = [line(text, 0, "stderr", meaning=meaning) for text, meaning in meanings.items()]
    captured = CapturedStreams(1, out=True, err=True).feed(*events)
    text = "\n".join(line for lines in captured.end() for line in lines)
    for code, event in zip((31, 33, 2), events, strict=True):
        assert f"\x1b[{code}m{event.text}\x1b[0m" in text
    assert CapturedStreams(1).feed(*events).end()[1][:3] == [event.text for event in events]


@pytest.fixture
def small_terminal(monkeypatch):
    """A terminal of 20 columns and 8 rows."""
    monkeypatch.setattr(Screen, "fileno", lambda screen: -1, raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((20, 8)))


@pytest.mark.usefixtures("small_terminal")
def test_open_lines_are_drawn_over_and_as_many_as_a_terminal_has_rows():
    captured = TwoStreams(20, prefix_template="[$rank] ")
    for percent in range(3):
        captured.feed(*(line(f"{percent}% of {rank}", rank, open=True) for rank in range(20)))
    assert captured.screen == [*(f"[{rank}] 2% of {rank}" for rank in range(7)), ""]


@pytest.mark.usefixtures("small_terminal")
@pytest.mark.parametrize(("letter", "fitting"), [("x", 15), ("学", 7)])
def test_a_long_open_line_is_not_wrapped(letter, fitting):
    captured = TwoStreams(prefix_template="[$rank] ")
    for _ in range(2):
        captured.feed(line(letter * 100, open=True))
    assert captured.screen[0].rstrip() == "[0] " + letter * fitting


def test_open_lines_stand_below_the_lines_and_above_what_others_write():
    captured = TwoStreams()
    for percent in (40, 50):
        captured.feed(*(line(f"{percent}%", rank, open=True) for rank in (0, 1)))
    captured.feed(line("news"), line("news", 1), *(line("60%", rank, open=True) for rank in (0, 1)))
    captured.out.write("<end>")
    assert [captured.screen[index] for index in (0, 1, -1)] == ["[0-1] news", "[0-1] 60%", "<end>"]


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": ""}])
def test_a_terminal_that_cannot_draw_is_written_to_as_a_pipe(environment):
    captured = TwoStreams(environment=environment).feed(line("\x1b[31mred\x1b[0m"), bar(0, 3))
    captured.end()
    assert "\x1b" not in captured.out.getvalue()
    assert captured.out.getvalue().startswith("[0] red\n")


def test_no_colour_is_ours_where_none_are_wanted():
    captured = TwoStreams(environment={"NO_COLOR": "1"})
    captured.feed(line("a"), bar(0, 3), *(StateChange(rank, "running", BEGAN) for rank in (0, 1)))
    captured.feed()
    captured.end("failed")
    assert "[0]   a" in captured.screen
    assert not re.search(r"\x1b\[[\d;]*m", captured.out.getvalue())


def test_standard_output_in_a_pipe_is_plain_while_the_board_is_drawn_on_standard_error():
    captured = CapturedStreams(out=False, err=True)
    captured.feed(line("\x1b[31ma\x1b[0m", 1), bar(0, 3), *(StateChange(rank, "running", BEGAN) for rank in (0, 1)))
    captured.feed()
    assert captured.out.getvalue() == "[1] a\n"
    assert any("3/10" in item for item in on_screen(captured.err.getvalue()))


def test_a_hundred_thousand_lines_are_shown_or_counted():
    captured = TwoStreams(8)
    for number in range(100_000):
        captured.view.apply(line(str(number), number % 8))
    captured.feed()
    captured.end()
    skipped = int(re.search(r"\.\.\. ([\d,]+) lines came faster", captured.out.getvalue())[1].replace(",", ""))
    assert skipped + sum(bool(re.match(r"\[\d\] +\d+$", item)) for item in captured.screen) == 100_000


def board(size, columns=200, rows=24, *, failed=(), nodes=(), **bars):
    view = RunState(size)
    for rank in range(size):
        view.apply(StateChange(rank, "failed" if rank in failed else "running", BEGAN, str(rank)))
        for label, done in bars.items():
            view.apply(Progress(rank, label, done + rank, 100, BEGAN, rate=1.0))
        view.apply(Metric(rank, "loss", 0.5, 1, BEGAN))
    for node in nodes:
        view.apply(node)
    run = SimpleNamespace(view=view, name="train.py", started=time.time() - 5)
    return [text.plain for text in board_lines(run, view.glances(), columns=columns, rows=rows)]


@pytest.mark.parametrize(("columns", "rows"), [(20, 5), (40, 24), (80, 24), (200, 60), (10, 2), (1, 1)])
@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_a_board_keeps_to_its_room(columns, rows, size):
    lines = board(size, columns, rows, epoch=3, batch=30)
    assert 1 <= len(lines) <= rows
    assert all(len(line) <= max(columns - 1, 1) for line in lines)


def test_what_does_not_fit_beside_a_rank_stands_below_it():
    assert board(1, columns=50, rows=9, epoch=3, batch=30)[1:] == [
        "[0] epoch ░░░░░░░░░░░░ 3/100 1 it/s 01:37",
        "    batch ████░░░░░░░░ 30/100 1 it/s 01:10",
        "    loss 0.5",
    ]


def test_sixty_four_ranks_are_a_line_for_each_state():
    lines = board(64, failed=(40,), batch=3)
    assert [line.partition("  ")[0] for line in lines[1:]] == [
        "[40] ✖ failed",
        "[0-39,41-63] batch ░░░░░░░░░░░░ 3/100 1 it/s 01:37 (the slowest of 63)",
    ]


def test_ranks_of_several_nodes_are_a_line_for_each_where_there_is_room():
    nodes = [NodeRanks(node, f"host-{node}", 16 * node, 16 * node + 15) for node in range(4)]
    labels = {rows: [line.split()[0] for line in board(64, rows=rows, nodes=nodes, batch=3)[1:]] for rows in (4, 24)}
    assert labels == {4: ["[0-63]"], 24: ["[0-15]", "[16-31]", "[32-47]", "[48-63]"]}


def test_a_terminal_that_has_become_narrower_is_wiped_as_it_shows_it(monkeypatch):
    screen, sizes = Screen(is_terminal=True), [(80, 24)]
    monkeypatch.setattr(TerminalSink, "_measure", lambda self: setattr(self._console, "size", sizes[-1]) or sizes[-1])
    sink = standard_sink(screen, screen, {"TERM": "xterm"})
    sink.show_open(["x" * 25, "y"])
    sizes.append((10, 24))  # in which it shows the first in three rows
    received = len(screen.getvalue())
    sink.write([LabelledLine("stdout", "a")])
    assert screen.getvalue()[received:].partition("a")[0].count("\x1b[1A") == 4


def test_what_the_encoding_of_a_terminal_lacks_takes_the_columns_of_what_stands_for_it():
    screen = io.TextIOWrapper(io.BytesIO(), "ascii")
    sink = TerminalSink(screen, screen, screen, has_colours=False)
    sink.show_open(["█" * 30])
    screen.flush()
    assert max(map(len, on_screen(screen.buffer.getvalue().decode()))) == 79


def test_a_failure_is_reported_with_its_rank_its_traceback_and_what_to_do():
    captured = CapturedStreams()
    captured.feed(
        Failure(1, "ValueError", "bad batch", "Traceback", JUST_NOW, advice="pass drop_last=True"),
        Failure(0, "RuntimeError", "closed by peer", "", JUST_NOW, lost_connection=True),
    )
    assert captured.front_end.has_shown_failure is False
    _, err = captured.end("failed")
    cause = ["✖ train.py failed after 01:15", "✖ rank 1 stopped with ValueError: bad batch", "Traceback"]
    assert err == [*cause, "pass drop_last=True", "rank 0 lost its connection", "All output: /runs/1"]
    assert captured.front_end.has_shown_failure is True


@pytest.mark.parametrize(
    ("ranks", "error", "reported"),
    [
        ((1,), ("ValueError", "bad batch"), ["✖ rank 1 stopped with ValueError: bad batch", "Traceback"]),
        ((0, 1), ("SystemExit", "2"), ["✖ rank 0 stopped with SystemExit: 2"]),
    ],
)
def test_a_quiet_run_that_fails_reports_why_and_an_exit_with_a_code_in_one_line(ranks, error, reported):
    captured = CapturedStreams(quiet=True).feed(*(Failure(rank, *error, "Traceback", BEGAN + rank) for rank in ranks))
    assert captured.end("failed")[1] == reported


def test_a_run_that_was_stopped_has_no_failure_to_report():
    captured = CapturedStreams().feed(Failure(0, "KeyboardInterrupt", "", "", BEGAN))
    assert captured.end("stopped")[1][-2:] == ["■ train.py stopped after 01:15", "All output: /runs/1"]
    assert captured.front_end.has_shown_failure is False


def test_something_rich_is_shown_as_its_text():
    bundles = ({"text/html": "<b>", "text/plain": "a\nb"}, {"image/png": ""})
    captured = CapturedStreams().feed(*(Display(rank, data, {}, 0.0) for rank, data in enumerate(bundles)))
    assert captured.end()[0] == ["[0] a", "[0] b", "[1] <image/png>"]


TRAIN = """
from accelerate_nb import Accelerator
from tqdm import tqdm
import time
accelerator = Accelerator()
accelerator.init_trackers("run")
print("hello")
for step in tqdm(range(30), desc="train"):
    time.sleep(0.05)
    accelerator.log({"loss": 1 / (step + 1)}, step=step)
accelerator.wait_for_everyone()
if accelerator.process_index == 1:
    raise ValueError("the end of rank 1")
"""


def test_a_real_launch_in_a_terminal_shows_lines_board_and_cause(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    command = ["-m", "accelerate_nb", "launch", "--cpu", "-n", "2", "--folder", str(tmp_path / "runs"), "train.py"]
    environment = {**os.environ, "TERM": "xterm", "HOME": str(tmp_path)}
    terminal = {"dimensions": (24, 72), "timeout": 120, "encoding": "utf-8"}
    child = pexpect.spawn(sys.executable, command, cwd=tmp_path, env=environment, **terminal)
    child.expect(pexpect.EOF)
    child.close()
    screen = on_screen(child.before)
    assert child.exitstatus == 1
    assert "[0-1] hello" in screen
    assert re.search(r"train .*█.*/30", re.sub(r"\x1b\[[\d;]*m", "", child.before))
    headline = screen.index("✖ rank 1 stopped with ValueError: the end of rank 1")
    assert 'raise ValueError("the end of rank 1")' in screen[headline + 2]
    assert screen[headline + 3] == "ValueError: the end of rank 1"
    assert screen.count("ValueError: the end of rank 1") == 1
    assert any(item.startswith("  loss  ") for item in screen)
    assert screen[-2].startswith("All output: ")
