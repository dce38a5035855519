"""Plain text in a real kernel's cell."""

import nbformat
import pytest
from nbclient import NotebookClient

BEGIN = """
import os
from pathlib import Path
from types import SimpleNamespace
from accelerate_nb.events.event_types import Display, LogLine
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.host import host
from accelerate_nb.notebook.display.text import TextFrontEnd
from tests.notebook.paper import line

view = RunState(size=2)
front_end = TextFrontEnd(host(os.environ).screen, "[$rank] ", interval=0.0)
front_end.opened(SimpleNamespace(view=view, folder=Path("/runs/1"), name="train", started=1.0))
"""
BARS = """
for percent in range(0, 100, 10):
    view.apply(line(f"{percent}%", 0, "stderr", open=True)); view.apply(line(f"{percent}%", 1, "stderr", open=True))
    front_end.refresh()
"""
CELLS = {
    "meant": """
view.apply(LogLine(0, "stderr", "WARNING:root:slow", 0.0, meaning="warning"))
view.apply(LogLine(0, "stderr", "ERROR:root:wrong", 0.0, meaning="error"))
view.apply(line("\x1b[32mgreen\x1b[0m", 1, "stderr")); view.apply(line("bye"))
""",
    "bars": BARS
    + """
view.apply(line("100%", 0, "stderr")); view.apply(line("100%", 1, "stderr"))
front_end.refresh()
""",
    "unfinished": BARS,
    "rich": """
view.apply(Display(1, {"text/html": "<b>bold</b>", "text/plain": "bold",
                       "application/vnd.jupyter.widget-view+json": {"model_id": "x"}}, {"isolated": True}, 0.0))
""",
}


@pytest.fixture(scope="module")
def outputs():
    """The outputs of each cell, as a real kernel gives them."""
    cells = [nbformat.v4.new_code_cell(f"{BEGIN}{source}front_end.closed()") for source in CELLS.values()]
    NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=60, kernel_name="python3").execute()
    return {name: cell.outputs for name, cell in zip(CELLS, cells, strict=True)}


def test_a_cell_shows_progress_in_one_block_that_is_gone_in_the_end(outputs):
    blocks = [output for output in outputs["bars"] if output.output_type == "display_data"]
    streams = [output for output in outputs["bars"] if output.output_type == "stream"]
    assert [block.data["text/plain"] for block in blocks] == [""]
    assert [(stream.name, stream.text) for stream in streams] == [("stdout", "[0] 100%\n[1] 100%\n")]


def test_only_errors_go_to_standard_error_of_a_cell_which_a_page_paints_as_an_alarm(outputs):
    assert [(output.name, output.text) for output in outputs["meant"]] == [
        ("stdout", "\x1b[93m[0] WARNING:root:slow\x1b[0m\n"),
        ("stderr", "[0] ERROR:root:wrong\n"),
        ("stdout", "[1] \x1b[32mgreen\x1b[0m\n[0] bye\n"),
    ]


def test_a_cell_keeps_the_last_progress_of_a_run_that_broke_off(outputs):
    streams = [output.text for output in outputs["unfinished"] if output.output_type == "stream"]
    assert streams[0] == "[0] 90%\n[1] 90%\n"


def test_a_cell_shows_something_rich_without_its_widget(outputs):
    label, rich = outputs["rich"]
    assert label.text == "[1]\n"
    assert rich.data == {"text/html": "<b>bold</b>", "text/plain": "bold"}
    assert rich.metadata == {"isolated": True}
