"""A report for notebooks that are kept in git: small, in short lines, and without what differs between two equal runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from accelerate_nb.events.metric_names import logged_names
from accelerate_nb.events.run_state import RunState
from accelerate_nb.reports.html import full_html
from accelerate_nb.reports.metric_curves import MetricCurve, coarsened
from accelerate_nb.reports.report import identified
from accelerate_nb.reports.run_info import RunFacts
from accelerate_nb.reports.summary import LogTail, RunSummary, digest_of
from accelerate_nb.reports.text import full_text

# What each may take of a notebook's file, in bytes, where there is no error.
_HTML, _TEXT = 20_000, 6_000
_ERROR = 6_000
_MOST_PICTURES = 6
# The same beneath a panel, which takes most of the rest.
_PANEL_HTML, _PANEL_TEXT, _PANEL_ERROR = 160_000, 50_000, 20_000
# The ends of lines within rows; no text has these letters, which would be escaped.
_BETWEEN_CELLS = re.compile(r"\n(?=<td|</tr>)")
_PICTURE = re.compile(r'src="data:[^"]*"')
# More ranks than this are drawn as a band.
_MOST_LINES_DRAWN = 2
# Of all ranks together, and of each at least.
_LINES, _PANEL_LINES, _TEXT_LINES, _FEWEST_LINES = 40, 20, 12, 3


def compact(facts: RunFacts, view: RunState, element_id: str) -> dict[str, str]:
    """
    A run that is over as small `text/html` and `text/plain`, whose HTML is an element with the id `element_id`.

    Left out are the run's folder, the load of the machine and its devices at the end, and pictures of what no code logged.

    >>> compact(facts, run.view, "accelerate-nb-8f2b-1")["text/plain"]
    """
    digest = _reduced(digest_of(facts, view, live=False, error_limit=_ERROR))
    of_text = replace(digest, tails=_shortened(digest.tails, _TEXT_LINES))
    return {"text/html": identified(element_id, full_html(digest, _HTML)), "text/plain": full_text(of_text, _TEXT)}


def beneath_panel(facts: RunFacts, view: RunState, element_id: str) -> dict[str, str]:
    """
    The same of a report that scripts turn into the panel, which has all lines and charts: what stays where no script runs.

    It has the run's folder, the machine and the devices; its HTML has long lines, as the script beside it.
    """
    digest = digest_of(facts, view, live=False, error_limit=_PANEL_ERROR)
    logged = logged_names(curve.name for curve in digest.curves)
    drawn = [_drawn(curve) for curve in digest.curves if curve.name in logged or not logged]
    digest = replace(digest, pictures=tuple(drawn[:_MOST_PICTURES]), tails=_shortened(digest.tails, _PANEL_LINES))
    of_text = replace(digest, tails=_shortened(digest.tails, _TEXT_LINES))
    html = _PICTURE.sub(
        lambda found: found[0].replace("\n", ""), _BETWEEN_CELLS.sub("", full_html(digest, _PANEL_HTML))
    )
    return {"text/html": identified(element_id, html), "text/plain": full_text(of_text, _PANEL_TEXT)}


def _reduced(digest: RunSummary) -> RunSummary:
    logged = logged_names(curve.name for curve in digest.curves)
    drawn = [_drawn(curve) for curve in digest.curves if curve.name in logged]
    return replace(
        digest,
        host=(),
        rows=tuple(replace(row, devices=row.lasting_devices) for row in digest.rows),
        pictures=tuple(drawn[:_MOST_PICTURES]),
        tails=_shortened(digest.tails, _LINES),
        folder="",
    )


def _drawn(curve: MetricCurve) -> MetricCurve:
    curve = coarsened(curve)
    return curve if len(curve.lines) <= _MOST_LINES_DRAWN else replace(curve, lines={})


def _shortened(tails: Sequence[LogTail], lines: int) -> tuple[LogTail, ...]:
    most = max(_FEWEST_LINES, lines // max(len(tails), 1))
    return tuple(replace(tail, lines=tail.lines[-most:]) for tail in tails)
