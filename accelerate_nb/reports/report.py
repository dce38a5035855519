"""A run as a static report: HTML and text that need nothing but themselves."""

from __future__ import annotations

import hashlib

from accelerate_nb.events.view import RunView
from accelerate_nb.reports.digest import digest_of
from accelerate_nb.reports.facts import Facts
from accelerate_nb.reports.markup import full_html, live_html
from accelerate_nb.reports.wording import full_text, live_text

# What each may take of a notebook's file, in bytes.
_TEXT = 50_000
_HTML = 160_000
# The most characters of each text of an error; HTML and text cut it to what they have room for.
_ERROR = 20_000


def static(facts: Facts, view: RunView, *, live: bool) -> dict[str, str]:
    """
    A run as `text/html` and `text/plain`, at any moment.

    `live` is for a report that is drawn again and again while the run goes on: lighter, and what is new stands last. The
    HTML loses nothing that matters where styles, folding or pictures are taken out of it; it is an element with the id
    `place_of(facts)`.

    >>> static(facts, run.view, live=False)["text/plain"]
    """
    digest = digest_of(facts, view, live=live, error_room=_ERROR)
    html = live_html(digest) if live else full_html(digest, _HTML)
    text = live_text(digest) if live else full_text(digest, _TEXT)
    return {"text/html": f'<div id="{place_of(facts)}">\n{html}\n</div>\n', "text/plain": text}


def place_of(facts: Facts) -> str:
    """What marks a run's report on a page."""
    said = f"{facts.name}\0{facts.folder}\0{facts.started}"
    return "accelerate-nb-" + hashlib.sha256(said.encode(errors="replace")).hexdigest()[:12]
