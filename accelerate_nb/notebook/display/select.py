"""The choice of the front end: a live panel, HTML that is redrawn, lines of text, or none."""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal, TypeAlias

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import MissingExtraError
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.launching.run import FrontEnd, Run, keep_drawing
from accelerate_nb.notebook.display.text import TextFrontEnd
from accelerate_nb.notebook.host import NotebookHost, host
from accelerate_nb.user_warnings import warn_user

Way: TypeAlias = Literal["panel", "html", "text", "off"]


def choose(
    mode: Literal["auto", "widget", "html", "text", "off"], notebook_host: NotebookHost, *, has_widgets: bool
) -> Way:
    """The display mode that fits the request and the host; raises `MissingExtraError` where a panel is requested without anywidget."""
    if mode == "off":
        return "off"
    if mode == "text" or notebook_host.kind != "jupyter":
        return "text"
    if mode == "widget" and not has_widgets:
        raise MissingExtraError("panel='widget' needs anywidget: pip install anywidget")
    if mode == "auto" and notebook_host.reader != "page":
        return "text"
    # Kaggle shows no widgets but its own
    if mode == "html" or (mode == "auto" and (notebook_host.service == "kaggle" or not has_widgets)):
        return "html"
    return "panel"


def display_settings(panel: bool | str | None = None, report: str | None = None) -> LaunchingConfig:
    """The settings with which this process shows a run that it did not launch."""
    __tracebackhide__ = True
    given = {} if panel is None or panel is True else {"panel": "off" if panel is False else panel}
    names = ("ACCELERATE_NB_PANEL", "ACCELERATE_NB_REPORT")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    return resolve({**given, "report": report}, environment).launching


def display_way(mode: LaunchingConfig, notebook_host: NotebookHost) -> Way:
    """The display mode for a host."""
    has_widgets = find_spec("anywidget") is not None and find_spec("ipywidgets") is not None
    return choose(mode.panel, notebook_host, has_widgets=has_widgets)


def front_end(mode: LaunchingConfig, environment: Mapping[str, str]) -> FrontEnd:
    """The front end for this host."""
    if mode.report is not None:
        warn_user(
            "report has no effect any more, and goes with the next release: a notebook keeps one small report of each run.",
            FutureWarning,
        )
    notebook_host = host(environment)
    way = display_way(mode, notebook_host)
    if way == "text":
        # what executes a notebook keeps its outputs: the report comes after the lines
        is_kept = mode.panel == "auto" and notebook_host.reader == "file"
        template = mode.log_line_prefix_template
        return TextFrontEnd(notebook_host.screen, "[$rank] " if template is None else template, report=is_kept)
    if way == "off":
        return FailureOnly()
    from accelerate_nb.notebook.display.run_display import RunDisplay

    return RunDisplay(notebook_host.service or "jupyter", live=way == "panel")


def shows_at_once(front_end: FrontEnd) -> bool:
    """Whether a background run is shown under the cell that launched it by default."""
    return not isinstance(front_end, TextFrontEnd)


class FailureOnly(FrontEnd):
    """Shows nothing of a run but a failure that no caller waits for."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._is_waited_for = False

    def opened(self, run: Run) -> None:
        """The caller waits, and will get the failure itself."""
        self._is_waited_for = True

    def closed(self) -> None:
        """Print that the run has failed, if it has, and no caller has waited."""
        run = self._run
        if run is not None and not self._is_waited_for and run.view.state == "failed":
            what = f"{run.name} has failed in the background; wait() of its run raises why."
            sys.stderr.write(f"{what} Its output is in {shown_path(run.folder)}\n")

    def follow(self, run: Run) -> None:
        """Wait until the run is over; returns at once."""
        self._run = run
        keep_drawing(run, self.refresh, self.closed)

    def show(self, run: Run) -> None:
        """The state of the run in one line."""
        sys.stdout.write(f"{run!r}\n")
