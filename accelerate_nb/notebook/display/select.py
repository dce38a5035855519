"""Which front end shows a run: a live panel, HTML that is drawn anew, lines of text, or none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, TypeAlias

from accelerate_nb.config.launching import Launching
from accelerate_nb.errors import MissingExtraError
from accelerate_nb.launching.following import keep_drawing
from accelerate_nb.launching.run import FrontEnd, Watched
from accelerate_nb.notebook.host import Host, host
from accelerate_nb.notebook.plain import PlainText

Way: TypeAlias = Literal["panel", "html", "text", "off"]


@dataclass(frozen=True, slots=True)
class Choice:
    """How a run is shown, and why, in a person's words."""

    way: Way
    why: str


def choose(wish: Literal["auto", "widget", "html", "text", "off"], here: Host, *, has_widgets: bool) -> Choice:
    """
    The way to show a run that fits the wish and the place; pure.

    Raises `MissingExtraError` where a panel is asked for, and what it is made of is not installed.
    """
    if wish == "off":
        return Choice("off", "panel='off' was asked for")
    if wish == "text" or here.kind != "jupyter":
        return Choice("text", "panel='text' was asked for" if wish == "text" else "this is no notebook")
    if wish == "widget":
        if not has_widgets:
            raise MissingExtraError("panel='widget' needs anywidget: pip install anywidget")
        return Choice("panel", "panel='widget' was asked for")
    if wish == "html":
        return Choice("html", "panel='html' was asked for")
    if here.reader != "page":
        return Choice("text", f"what reads this kernel is a {here.reader}")
    if here.service == "kaggle":
        return Choice("html", "Kaggle shows no widgets but its own")
    return Choice("panel", "a notebook") if has_widgets else Choice("html", "anywidget is not installed")


def front_end(wish: Launching, environment: Mapping[str, str]) -> FrontEnd:
    """What shows a run in this place."""
    here = host(environment)
    way = choose(wish.panel, here, has_widgets=_has_widgets()).way
    if way == "text":
        return PlainText(here.screen, wish.log_line_prefix_template)
    if way == "off":
        return Nothing()
    from accelerate_nb.notebook.live.cards import Card

    return Card(here.service or "jupyter", live=way == "panel")


def shows_at_once(front_end: FrontEnd) -> bool:
    """Whether a run that nobody waits for is shown where it was launched, if nothing else was said."""
    return not isinstance(front_end, PlainText)


def _has_widgets() -> bool:
    return find_spec("anywidget") is not None and find_spec("ipywidgets") is not None


class Nothing:
    """Shows nothing of a run but that it has failed, where nobody waits to be told."""

    def __init__(self, tell: Callable[[str], object] | None = None) -> None:
        self._tell = tell
        self._run: Watched | None = None
        self._is_waited_for = False

    def opened(self, run: Watched) -> None:
        """Somebody waits, and will be told what comes of it."""
        self._is_waited_for = True

    def refresh(self) -> None:
        """Nothing is drawn."""

    def closed(self) -> None:
        """Say that the run has failed, if it has, and nobody has waited."""
        run = self._run
        if run is not None and not self._is_waited_for and run.view.state == "failed":
            tell = self._tell or sys.stderr.write
            tell(
                f"{run.name} has failed in the background; wait() of its run raises why. Its output is in {run.folder}\n"
            )

    def follow(self, run: Watched) -> None:
        """Wait until the run is over; returns at once."""
        self._run = run
        keep_drawing(self, run)

    def show(self, run: Watched) -> None:
        """Say in one line how the run is."""
        sys.stdout.write(f"{run!r}\n")
