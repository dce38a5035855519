"""A run as a static report: HTML and text that need nothing but themselves."""

from __future__ import annotations

import hashlib
from typing import Literal, TypeAlias

from accelerate_nb.events.run_state import RunState
from accelerate_nb.reports.html import full_html, live_html
from accelerate_nb.reports.run_info import RunFacts
from accelerate_nb.reports.summary import digest_of
from accelerate_nb.reports.text import full_text, live_text

# What each may take of a notebook's file, in bytes.
_TEXT = 50_000
_HTML = 160_000
# The most characters of each text of an error; HTML and text cut it to their own limits.
_ERROR = 20_000

# What a notebook keeps of a run: the panel too, or a small report without scripts.
Report: TypeAlias = Literal["interactive", "static"]


def static(facts: RunFacts, view: RunState, *, live: bool) -> dict[str, str]:
    """
    A run as `text/html` and `text/plain`, at any moment.

    `live` is for a report that is drawn again and again while the run goes on: lighter, and what is new stands last. The
    HTML loses nothing that matters where styles, folding or pictures are taken out of it; it is an element with the id
    `report_id(facts)`.

    >>> static(facts, run.view, live=False)["text/plain"]
    """
    digest = digest_of(facts, view, live=live, error_limit=_ERROR)
    html = live_html(digest) if live else full_html(digest, _HTML)
    text = live_text(digest) if live else full_text(digest, _TEXT)
    return {"text/html": identified(report_id(facts), html), "text/plain": text}


def identified(element_id: str, html: str) -> str:
    """HTML as an element with an id, which may be empty."""
    return f'<div id="{element_id}">\n{html}\n</div>\n' if element_id else f"<div>\n{html}\n</div>\n"


def report_id(facts: RunFacts) -> str:
    """The id of a run's report on a page."""
    identity = f"{facts.name}\0{facts.folder}\0{facts.started}"
    return "accelerate-nb-" + hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:12]
