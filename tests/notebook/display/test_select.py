"""A run is shown in the way that its place can bear."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.errors import MissingExtraError
from accelerate_nb.events.model import StateChange
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.display.select import FailureOnly, choose, front_end, shows_at_once
from accelerate_nb.notebook.display.text import PlainText
from accelerate_nb.notebook.display.text_sinks import CellSink
from accelerate_nb.notebook.host import NotebookHost


def place(kind: Any = "jupyter", service: Any = None, reader: Any = "page") -> NotebookHost:
    return NotebookHost(kind, service, CellSink, reader)


@pytest.mark.parametrize(
    ("wish", "here", "way"),
    [
        ("auto", place(), "panel"),
        ("auto", place(service="colab"), "panel"),
        ("auto", place(service="vscode"), "panel"),
        ("auto", place(service="kaggle"), "html"),
        ("auto", place(reader="file"), "text"),
        ("auto", place(reader="console"), "text"),
        ("auto", place("script"), "text"),
        ("auto", place("ipython"), "text"),
        ("widget", place(reader="file"), "panel"),
        ("widget", place("script"), "text"),
        ("html", place(), "html"),
        ("html", place(reader="file"), "html"),
        ("html", place("script"), "text"),
        ("text", place(), "text"),
        ("off", place(), "off"),
        ("off", place("script"), "off"),
    ],
)
def test_the_way_fits_the_wish_and_the_place(wish, here, way):
    assert choose(wish, here, has_widgets=True).way == way


def test_without_widgets_a_notebook_is_shown_html():
    assert choose("auto", place(), has_widgets=False).way == "html"
    with pytest.raises(MissingExtraError, match="pip install anywidget"):
        choose("widget", place(), has_widgets=False)


def test_a_script_gets_lines_of_text_and_is_not_shown_what_nobody_waits_for():
    shown = front_end(LaunchingConfig(), {})
    assert isinstance(shown, PlainText)
    assert not shows_at_once(shown)
    assert shows_at_once(front_end(LaunchingConfig(panel="off"), {}))


class Run:
    """A run that nobody waits for."""

    name, folder = "train", "/runs/1"

    def __init__(self, state: Any) -> None:
        self.view = RunState(1)
        self.view.apply(StateChange(None, state, 1.0))
        self.done = True


@pytest.mark.parametrize(("state", "said"), [("failed", True), ("finished", False), ("stopped", False)])
def test_a_failure_that_nobody_waits_for_is_told_though_nothing_is_shown(state, said):
    told = io.StringIO()
    FailureOnly(told.write).follow(Run(state))  # type: ignore[arg-type]
    for thread in threading.enumerate():
        if thread.name == "accelerate_nb panel":
            thread.join(10)
    assert ("train has failed" in told.getvalue()) is said


def test_a_failure_that_somebody_waits_for_is_raised_there():
    told = io.StringIO()
    nothing = FailureOnly(told.write)
    nothing.opened(Run("failed"))  # type: ignore[arg-type]
    nothing.refresh()
    nothing.closed()
    assert not told.getvalue()
