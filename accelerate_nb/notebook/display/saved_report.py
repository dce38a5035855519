"""The report that a saved notebook keeps of a run, and that is the panel where a page runs scripts."""

from __future__ import annotations

from dataclasses import replace

from accelerate_nb.events.view import RunView
from accelerate_nb.notebook.live.feed import Feed
from accelerate_nb.notebook.page.hydration import script
from accelerate_nb.reports.facts import Facts
from accelerate_nb.reports.fitting import saved_size
from accelerate_nb.reports.report import place_of, static

# A saved notebook holds at most 300 kB of a run, with what the notebook's format puts around it.
_ROOM = 295_000


def bundle(facts: Facts, view: RunView, *, live: bool, interactive: bool) -> dict[str, str]:
    """
    A run as `text/html` and `text/plain`, at any moment.

    `live` is for a report that is drawn again and again while the run goes on: lighter, and what is new stands last. With
    `interactive`, a page that runs scripts of outputs shows the panel instead, without a kernel.

    Both together take at most 300 kB of a notebook's file, however long the run was.

    >>> bundle(facts, run.view, live=False, interactive=True)["text/plain"]
    """
    made = static(facts, view, live=live)
    if interactive and not live:
        # its clock stands at the end: the same run is saved as the same bytes
        messages = Feed(view, lambda: view.ended or facts.started).frozen(
            replace(facts, background=False, can_act=False)
        )
        room = _ROOM - sum(map(saved_size, made.values()))
        made["text/html"] += script(place_of(facts), messages, room)
    return made
