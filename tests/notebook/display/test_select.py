"""A run is shown in the way that its place can bear."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.errors import ConfigurationError, MissingExtraError
from accelerate_nb.events.event_types import StateChange
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.display.select import FailureOnly, choose, display_settings, front_end, shows_at_once
from accelerate_nb.notebook.display.text import TextFrontEnd
from accelerate_nb.notebook.display.text_output import CellSink
from accelerate_nb.notebook.host import NotebookHost


def notebook_host(frontend: Any = "jupyter", service: Any = None, reader: Any = "page") -> NotebookHost:
    return NotebookHost(frontend, service, CellSink, reader)


@pytest.mark.parametrize(
    ("setting", "host", "way"),
    [
        ("auto", notebook_host(), "panel"),
        ("auto", notebook_host(service="colab"), "panel"),
        ("auto", notebook_host(service="vscode"), "panel"),
        ("auto", notebook_host(service="kaggle"), "html"),
        ("auto", notebook_host(reader="file"), "text"),
        ("auto", notebook_host(reader="console"), "text"),
        ("auto", notebook_host("script"), "text"),
        ("auto", notebook_host("ipython"), "text"),
        ("widget", notebook_host(reader="file"), "panel"),
        ("widget", notebook_host("script"), "text"),
        ("html", notebook_host(), "html"),
        ("html", notebook_host(reader="file"), "html"),
        ("html", notebook_host("script"), "text"),
        ("text", notebook_host(), "text"),
        ("off", notebook_host(), "off"),
        ("off", notebook_host("script"), "off"),
    ],
)
def test_the_way_fits_the_request_and_the_place(setting, host, way):
    assert choose(setting, host, has_widgets=True) == way


def test_without_widgets_a_notebook_is_shown_html():
    assert choose("auto", notebook_host(), has_widgets=False) == "html"
    with pytest.raises(MissingExtraError, match="pip install anywidget"):
        choose("widget", notebook_host(), has_widgets=False)


def test_a_script_gets_lines_of_text_and_is_not_shown_what_nobody_waits_for():
    shown = front_end(LaunchingConfig(), {})
    assert isinstance(shown, TextFrontEnd)
    assert not shows_at_once(shown)
    assert shows_at_once(front_end(LaunchingConfig(panel="off"), {}))


def test_a_run_that_is_attached_is_shown_as_the_call_or_the_environment_requests(monkeypatch):
    monkeypatch.setenv("ACCELERATE_NB_PANEL", "html")
    monkeypatch.setenv("ACCELERATE_NB_REPORT", "static")
    assert (display_settings().panel, display_settings().report) == ("html", "static")
    mine = display_settings(False, "interactive")
    assert (mine.panel, mine.report) == ("off", "interactive")
    with pytest.raises(ConfigurationError, match="report"):
        display_settings(report="large")


def over(state: Any) -> Any:
    """A run that has ended."""
    view = RunState(1)
    view.apply(StateChange(None, state, 1.0))
    return SimpleNamespace(name="train", folder="/runs/1", view=view, done=True)


@pytest.mark.parametrize(("state", "is_reported"), [("failed", True), ("finished", False), ("stopped", False)])
def test_a_failure_that_nobody_waits_for_is_reported_though_nothing_is_shown(state, is_reported, capsys):
    FailureOnly().follow(over(state))
    for thread in threading.enumerate():
        if thread.name == "accelerate_nb panel":
            thread.join(10)
    assert ("train has failed" in capsys.readouterr().err) is is_reported


def test_a_failure_that_somebody_waits_for_is_raised_there(capsys):
    nothing = FailureOnly()
    nothing.opened(over("failed"))
    nothing.refresh()
    nothing.closed()
    assert capsys.readouterr() == ("", "")
