"""A run as a static report: HTML and text that a saved notebook keeps."""

from __future__ import annotations

from dataclasses import replace

from accelerate_nb.events.view import RunView
from accelerate_nb.notebook.live.feed import Facts, Feed
from accelerate_nb.notebook.reports.digest import digest_of
from accelerate_nb.notebook.reports.fitting import saved_size
from accelerate_nb.notebook.reports.hydration import place_of, script
from accelerate_nb.notebook.reports.markup import full_html, live_html
from accelerate_nb.notebook.reports.wording import full_text, live_text

__all__ = ["Facts", "bundle"]

# A saved notebook holds at most 300 kB of a run, with what the notebook's format puts around it.
_ROOM = 295_000
_TEXT = 50_000
_HTML = 160_000
# The most characters of each text of an error; HTML and text cut it to what they have room for.
_ERROR = 20_000


def bundle(facts: Facts, view: RunView, *, live: bool, interactive: bool) -> dict[str, str]:
    """
    A run as `text/html` and `text/plain`, at any moment.

    `live` is for a report that is drawn again and again while the run goes on: lighter, and what is new stands last. With
    `interactive`, a page that runs scripts of outputs shows the panel instead, without a kernel.

    Both together take at most 300 kB of a notebook's file, however long the run was. The HTML loses nothing that matters
    where styles, scripts, folding or pictures are taken out of it.

    >>> bundle(facts, run.view, live=False, interactive=True)["text/plain"]
    """
    digest = digest_of(facts, view, live=live, error_room=_ERROR)
    place = place_of(facts.name, facts.folder, facts.started)
    if live:
        return {"text/html": _placed(place, live_html(digest)), "text/plain": live_text(digest)}
    text, static = full_text(digest, _TEXT), _placed(place, full_html(digest, _HTML))
    if interactive:
        # its clock stands at the end: the same run is saved as the same bytes
        messages = Feed(view, lambda: view.ended or facts.started).frozen(
            replace(facts, background=False, can_act=False)
        )
        static += script(place, messages, _ROOM - saved_size(text) - saved_size(static))
    return {"text/html": static, "text/plain": text}


def _placed(place: str, html: str) -> str:
    return f'<div id="{place}">\n{html}\n</div>\n'
