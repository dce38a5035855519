"""The report of a run in a saved notebook; where a page runs scripts, it becomes the panel."""

from __future__ import annotations

from dataclasses import replace

from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.display.message_feed import MessageFeed
from accelerate_nb.notebook.page.mount_script import script
from accelerate_nb.reports.compact_report import beneath_panel, compact
from accelerate_nb.reports.report import Report, report_id, static
from accelerate_nb.reports.run_info import RunFacts
from accelerate_nb.reports.size_limits import saved_size

# A saved notebook holds at most 300 kB of a run, with what the notebook's format puts around it.
_SIZE_LIMIT = 295_000


def kept(
    facts: RunFacts, view: RunState, report: Report, *, interactive: bool, with_code: bool = True, element_id: str = ""
) -> dict[str, str]:
    """
    The content that a notebook keeps of a run that is over, as the setting `report` says; the rest is as in `bundle`.

    `element_id` is that of a static report whose place a panel in a page takes.
    """
    if report == "static":
        return compact(facts, view, element_id)
    return bundle(facts, view, live=False, interactive=interactive, with_code=with_code)


def bundle(facts: RunFacts, view: RunState, *, live: bool, interactive: bool, with_code: bool = True) -> dict[str, str]:
    """
    A run as `text/html` and `text/plain`, at any moment.

    `live` is for a report that is redrawn during the run: lighter, with the newest at the end. With
    `interactive`, a page that runs scripts of outputs shows the panel instead, without a kernel; unless `with_code`, it
    does so where another report of the page brings the panel's code.

    Both together take at most 300 kB of a notebook's file, however long the run was.

    >>> bundle(facts, run.view, live=False, interactive=True)["text/plain"]
    """
    if live or not interactive:
        return static(facts, view, live=live)
    made = beneath_panel(facts, view, report_id(facts))
    # its clock shows the end: the same run is saved as the same bytes
    feed = MessageFeed(view, lambda: view.ended or facts.started)
    messages = feed.frozen(replace(facts, background=False, can_act=False))
    size_limit = _SIZE_LIMIT - sum(map(saved_size, made.values()))
    made["text/html"] += script(report_id(facts), messages, size_limit, with_code=with_code)
    return made
