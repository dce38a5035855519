"""Plain text in a real kernel's cell, in a terminal, and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap

import nbformat
import pytest
from nbclient import NotebookClient

from tests.notebook.paper import on_screen

FEED = """
from pathlib import Path
from types import SimpleNamespace
from accelerate_nb.events.model import Display, LogLine
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.host import host
from accelerate_nb.notebook.display.text import TextFrontEnd
import os

def line(text, rank=0, stream="stdout", open=False):
    return LogLine(rank, stream, text, 0.0, open)

def start():
    view = RunState(size=2)
    front_end = TextFrontEnd(host(os.environ).screen, "[$rank] ", interval=0.0)
    front_end.opened(SimpleNamespace(view=view, folder=Path("/runs/1"), name="train", started=1.0))
    return view, front_end
"""

LINES = """
view, front_end = start()
view.apply(line("hello", 1)); view.apply(line("INFO:root:trouble", 0, "stderr")); view.apply(line("bye"))
front_end.closed()
"""

BARS = """
view, front_end = start()
for percent in range(0, 100, 10):
    view.apply(line(f"{percent}%", 0, "stderr", open=True)); view.apply(line(f"{percent}%", 1, "stderr", open=True))
    front_end.refresh()
#middle
view.apply(line("100%", 0, "stderr")); view.apply(line("100%", 1, "stderr"))
front_end.refresh()
front_end.closed()
"""

RICH = """
view, front_end = start()
view.apply(Display(1, {"text/html": "<b>bold</b>", "text/plain": "bold",
                       "application/vnd.jupyter.widget-view+json": {"model_id": "x"}}, {"isolated": True}, 0.0))
front_end.closed()
"""

FLOOD = """
view, front_end = start()
for number in range(25_000):
    for rank in range(4):
        view.apply(line(f"step {number} loss 0.123456 " + "x" * 60, rank))
    if number % 1000 == 0:
        front_end.refresh()
front_end.closed()
"""

MEANT = """
view, front_end = start()
view.apply(LogLine(0, "stderr", "WARNING:root:slow", 0.0, meaning="warning"))
view.apply(LogLine(0, "stderr", "ERROR:root:wrong", 0.0, meaning="error"))
view.apply(line("\x1b[32mgreen\x1b[0m", 0, "stderr"))
front_end.closed()
"""

CELLS = {
    "lines": LINES,
    "meant": MEANT,
    "bars": BARS,
    "unfinished": BARS.replace("#middle", "front_end.closed(); raise SystemExit"),
    "rich": RICH,
    "flood": FLOOD,
}


@pytest.fixture(scope="module")
def outputs():
    """The outputs of each cell, as a real kernel gives them."""
    cells = [nbformat.v4.new_code_cell(source) for source in (FEED, *CELLS.values())]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=60, kernel_name="python3", allow_errors=True).execute()
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells[1:], strict=True)}


def test_a_cell_shows_labelled_lines_on_their_streams_in_order(outputs):
    assert [(output.name, output.text) for output in outputs["lines"]] == [
        ("stdout", "[1] hello\n[0] INFO:root:trouble\n[0] bye\n"),
    ]


def test_a_cell_shows_progress_in_one_block_that_is_gone_in_the_end(outputs):
    blocks = [output for output in outputs["bars"] if output.output_type == "display_data"]
    streams = [output for output in outputs["bars"] if output.output_type == "stream"]
    assert [block.data["text/plain"] for block in blocks] == [""]
    assert [(stream.name, stream.text) for stream in streams] == [("stdout", "[0] 100%\n[1] 100%\n")]


def test_only_errors_go_to_standard_error_of_a_cell_which_a_page_paints_as_an_alarm(outputs):
    assert [(output.name, output.text) for output in outputs["meant"]] == [
        ("stdout", "\x1b[93m[0] WARNING:root:slow\x1b[0m\n"),
        ("stderr", "[0] ERROR:root:wrong\n"),
        ("stdout", "[0] \x1b[32mgreen\x1b[0m\n"),
    ]


def test_a_cell_keeps_the_last_progress_of_a_run_that_broke_off(outputs):
    streams = [output.text for output in outputs["unfinished"] if output.output_type == "stream"]
    assert streams[0] == "[0] 90%\n[1] 90%\n"


def test_a_cell_shows_something_rich_without_its_widget(outputs):
    label, rich = outputs["rich"]
    assert label.text == "[1]\n"
    assert rich.data == {"text/html": "<b>bold</b>", "text/plain": "bold"}
    assert rich.metadata == {"isolated": True}


def test_a_flood_stays_under_a_megabyte_with_its_beginning_and_its_end(outputs):
    cell = nbformat.v4.new_code_cell(outputs=outputs["flood"])
    saved = nbformat.writes(nbformat.v4.new_notebook(cells=[cell]))
    assert len(saved.encode()) < 1_000_000
    text = "".join(output.text for output in outputs["flood"])
    assert text.startswith("[0] step 0 loss")
    for rank in range(4):
        assert f"[{rank}] step 24999 loss" in text
    assert "/runs/1" in text


def run_in_pipe(source):
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)


def test_a_pipe_gets_progress_only_when_it_is_over():
    done = run_in_pipe(FEED + BARS)
    assert done.stdout == ""
    assert done.stderr == "[0] 100%\n[1] 100%\n"


def test_a_pipe_gets_every_line():
    flood = FLOOD.replace("25_000", "6_000")
    assert run_in_pipe(FEED + flood).stdout.count("\n") == 24_000


def run_in_terminal(source, columns=20, rows=24):
    """What a terminal receives."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    received = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux says so when the other side has closed
            break
        if not part:
            break
        received += part
    os.close(ours)
    assert process.wait(30) == 0
    return received.decode().replace("\r\n", "\n")


def on_glass(received):
    """The lines that stand on the terminal after all this, but for those of the board."""
    board = re.compile(r"train  |\[.*\] [○●] ")
    return [line.rstrip() for line in on_screen(received) if line and not board.match(line)]


def test_a_terminal_draws_progress_over():
    received = run_in_terminal(FEED + BARS)
    assert received.count(" 50%") == 1
    assert on_glass(received) == ["[0-1] 100%"]


def test_a_terminal_keeps_progress_below_the_lines_and_above_what_others_write():
    middle = (
        'view.apply(line("news")); view.apply(line("news", 1)); front_end.refresh(); print("<end>"); raise SystemExit'
    )
    received = run_in_terminal(FEED + BARS.replace("#middle", middle))
    assert on_glass(received) == ["[0-1] news", "[0-1] 90%", "<end>"]


@pytest.mark.parametrize(("letter", "fitting"), [("x", 15), ("学", 7)])
def test_a_terminal_is_not_wrapped_by_long_progress(letter, fitting):
    source = f'view, front_end = start()\nfor _ in range(2):\n    view.apply(line("{letter}" * 100, open=True)); front_end.refresh()'
    assert on_glass(run_in_terminal(FEED + source)) == ["[0] " + letter * fitting]


def test_a_terminal_holds_no_more_open_lines_than_it_has_rows():
    source = """
view, front_end = start()
for percent in range(3):
    for rank in range(20):
        view.apply(line(f"{percent}% of {rank}", rank, open=True))
    front_end.refresh()
"""
    assert on_glass(run_in_terminal(FEED + source, rows=8)) == [f"[{rank}] 2% of {rank}" for rank in range(7)]


MEASURED = """
from accelerate_nb.events.model import Metric, StateChange
view, front_end = start()
front_end.opened(SimpleNamespace(view=view, folder=Path("/runs/1"), name="train", started=1.0))
for rank in range(2):
    view.apply(StateChange(rank, "running", 1.0))
for step in range(3):
    view.apply(line(f"step {step}"))
    for rank in range(2):
        view.apply(Metric(rank, "loss", 3.0 - step, step, 1.0))
    front_end.refresh()
view.apply(StateChange(None, "finished", 3.0))
front_end.closed()
"""

SUMMED_UP = ["train finished after 00:02", "  loss  █▅▁  min 1  max 3  last 1 mean of 2  step 2"]


def test_a_terminal_and_a_pipe_get_the_summary_of_metrics():
    assert on_glass(run_in_terminal(FEED + MEASURED)) == [*(f"[0] step {step}" for step in range(3)), *SUMMED_UP]
    done = run_in_pipe(FEED + MEASURED)
    assert done.stdout.splitlines() == [f"[0] step {step}" for step in range(3)]
    assert done.stderr.splitlines() == SUMMED_UP
