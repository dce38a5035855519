"""A run as a report, HTML and text that need nothing but themselves: what a notebook keeps of it, and shows where no panel can be."""

import hashlib
import html
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import NamedTuple

from accelerate_nb.events.event_types import LogLine, Meaning, StepProfile
from accelerate_nb.events.run_state import RankState, RunState, logged_names
from accelerate_nb.events.terminal_lines import SEQUENCE, legible, plain
from accelerate_nb.reports import summary
from accelerate_nb.reports.metric_curves import MOST_VALUES, coarsened, curves_of, names_of, picture
from accelerate_nb.reports.summary import FailureCause, cause_of, cause_of_hang, restart_line
from accelerate_nb.reports.text_format import (
    aligned,
    bytes_text,
    counted,
    first_fitting,
    fitted,
    left_out,
    narrowed,
    newest_fitting,
    ranks_text,
    saved_size,
    time_text,
)

# Mid-tones, legible on white and on black; the bright ones are the same.
_NAMED = ("#767676", "#d13438", "#2e8b3d", "#a97000", "#3178c6", "#a54cb5", "#17858f", "#767676")
# The CSS of the codes that begin a style; colours stand under 0. And the codes that end each of them.
_BEGINS = {1: "font-weight:bold;", 3: "font-style:italic;", 4: "text-decoration:underline;"}
_ENDS = {22: 1, 23: 3, 24: 4, 39: 0}
_LEVELS_OF_256 = (0, 95, 135, 175, 215, 255)


def as_html(text: str) -> str:
    """A line of text as HTML, its colours as spans; nothing that a rank wrote becomes markup."""
    parts: list[str] = []
    css: dict[int, str] = {}
    end = 0
    for found in SEQUENCE.finditer(text):
        parts.append(_dressed(text[end : found.start()], css))
        end = found.end()
        if found[1] is not None:
            _restyle(css, found[1])
    return "".join([*parts, _dressed(text[end:], css)])


def _dressed(text: str, css: Mapping[int, str]) -> str:
    style, written = "".join(css[code] for code in sorted(css)), html.escape(legible(text))
    return f'<span style="{style}">{written}</span>' if style and written else written


def _restyle(css: dict[int, str], codes: str) -> None:
    """Change a style by a colour sequence: `31` is red, `1` bold, `38;5;n` one of 256, `38;2;r;g;b` or `38:2::r:g:b` any."""
    # with colons the standard has a colour space first
    codes = re.sub(r"([34]8:2):\d*(:\d+:\d+:\d+)", r"\1\2", codes[:40])
    numbers = [min(int(code or 0), 255) for code in re.split("[;:]", codes)]
    while numbers:
        code = numbers.pop(0)
        if code == 0:
            css.clear()
        elif code in _BEGINS:
            css[code] = _BEGINS[code]
        elif code in _ENDS:
            css.pop(_ENDS[code], None)
        elif 30 <= code <= 37 or 90 <= code <= 97:
            css[0] = f"color:{_NAMED[code % 10]};"
        elif code in {38, 48}:
            colour = _chosen(numbers)
            # the other one is the background's
            if code == 38:
                css[0] = f"color:{colour};" if colour else ""


def _chosen(numbers: list[int]) -> str:
    """The colour that the next numbers name, which are taken away."""
    kind = numbers.pop(0) if numbers else 0
    if kind == 2 and len(numbers) >= 3:
        parts = [numbers.pop(0) for _ in range(3)]
    elif kind == 5 and numbers:
        number = numbers.pop(0)
        if number < 16:
            return _NAMED[number % 8]
        grey = 8 + 10 * (number - 232)
        parts = [grey if number >= 232 else _LEVELS_OF_256[(number - 16) // step % 6] for step in (36, 6, 1)]
    else:
        return ""
    return "#" + "".join(f"{part:02x}" for part in parts)


# What a report takes of a notebook's file, in bytes, where nothing of it is unusually long.
_HTML, _TEXT = 18_500, 6_000
# The least that is left for the last lines of all ranks, where the rest is.
_LEAST_LINES = 3_000
# The most characters of each text of an error, and the most bytes of each part.
_ERROR = 10_000
_TABLE, _CURVES, _PICTURES, _CALLS, _EVERY, _NOTES = 12_000, 10_000, 11_000, 6_000, 6_000, 2_000
_WIDEST, _WIDEST_TEXT = 1000, 500
_MOST_COLUMNS, _MOST_CURVES, _MOST_PICTURES, _MOST_RESTARTS = 6, 60, 24, 20
# The values of metrics that are read while the run goes on, and the lines that are shown of one rank.
_LIVE_VALUES, _LIVE_LINES = 20_000, 20
_TAIL, _TAIL_OF_MANY = 100, 40
_LAST_LINES = 30  # of each rank in the text, where all of them follow each other unfolded
_STATE_COLOURS = {
    "starting": "#7f7f7f",
    "running": "#3b82c4",
    "stopping": "#a97000",
    "finished": "#2e8b3d",
    "failed": "#d13438",
    "stopped": "#a97000",
}
_NUMBER = re.compile(r"(?:(?:step )?[-+\d.,e]+(?: (?:s|ms|µs)|%| (?:mean|sum) of \d+)?)?")
_BLOCKS = re.compile("[█▁-▇░]+")
_LEFT = ' style="text-align:left"'
_PRE = ' style="max-height:24em;overflow:auto;margin:4px 0"'
# a column in reverse begins at its end: the newest lines are seen first
_LOG = ' style="max-height:24em;overflow:auto;margin:4px 0;display:flex;flex-direction:column-reverse"'
_UNSCROLLED = 16  # lines that are lower than that
_GAP = ' style="margin:6px 0"'
_GREY = ' style="color:#7f7f7f"'
# What lines of logs mean, in mid-tones.
_COLOURS: dict[Meaning, str] = {"error": "#d13438", "warning": "#b5682a", "bar": "#767676"}


def run_report(facts: summary.RunFacts, view: RunState, *, live: bool = False) -> dict[str, str]:
    """A run as `text/html` and `text/plain`, at any moment; the same run gives the same bytes."""
    # `live`: drawn again and again while the run goes on, so lighter, with what is new last. The lines are short, and few differ where
    # few values do; the HTML loses nothing that matters without styles, folding or pictures.
    ranks = [view.rank(rank) for rank in view.ranks]
    cause = cause_of_hang(view.hang, _ERROR) if view.hang is not None else cause_of(view.failures, _ERROR)
    parts = [*_upper_parts(facts, view, ranks, cause, live=live)]
    if live:
        tails = [*_tails(ranks, 20)]
        every = (line for _, lines in tails for line in lines)
        if newest := sorted(every, key=lambda line: line.time)[-_LIVE_LINES:]:
            label = "[{}] " if len(tails) > 1 else ""
            html_lines = newest_fitting(newest, 20_000, lambda line: _html_line(line, label))
            text_lines = newest_fitting(newest, 8000, lambda line: _text_line(line, label.format(line.rank)))
            parts.append(_ReportPart(f"<pre>{chr(10).join(html_lines)}</pre>", "\n".join(text_lines)))
    else:
        tails = [*_tails(ranks, _TAIL if len(ranks) <= 4 else _TAIL_OF_MANY)]
        folder = f"All output: {narrowed(facts.folder, 500)}"
        foot = [_ReportPart(f"<div{_GREY}>{escape(folder)}</div>", folder)] if facts.folder else []
        html_left = max(_HTML - sum(saved_size(part.html) for part in [*parts, *foot]), _LEAST_LINES)
        text_left = max(_TEXT - sum(saved_size(part.text) + 10 for part in [*parts, *foot]), _LEAST_LINES)
        unfolded = cause.rank if cause is not None else tails[0][0].rank if tails else 0
        # the last lines of ranks share what is left
        for number, (rank, lines) in enumerate(tails):
            share, is_open = len(tails) - number, rank.rank == unfolded
            part = _tail_part(rank, lines, html_left // share, text_left // share, is_open=is_open)
            html_left, text_left = html_left - saved_size(part.html), text_left - saved_size(part.text) - 10
            parts.append(part)
        parts += foot
    html, text = [part.html for part in parts], [part.text for part in parts]
    named = "" if live else f' id="{report_id(facts)}"'
    return {"text/html": f"<div{named}>\n{chr(10).join(html)}\n</div>\n", "text/plain": "\n\n".join(text)}


def report_id(facts: summary.RunFacts) -> str:
    """The id of a run's report on a page."""
    identity = f"{facts.name}\0{facts.folder}\0{facts.started}"
    return "accelerate-nb-" + hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:12]


def _tails(ranks: Sequence[RankState], most: int) -> Iterator[tuple[RankState, Sequence[LogLine]]]:
    for rank in summary.shown_alone(ranks):
        # a line that has not ended, such as a bar, was the last that the rank wrote
        if lines := (*rank.lines[-most:], *rank.open_lines):
            yield rank, lines


# ---------------------------------------------------------------------------------------------------------------- parts


class _ReportPart(NamedTuple):
    html: str
    text: str


def _tail_part(
    rank: RankState, lines: Sequence[LogLine], html_limit: int, text_limit: int, *, is_open: bool
) -> _ReportPart:
    """As many of these last lines of a rank as fit."""
    line_count = rank.line_count + len(rank.open_lines)
    html = newest_fitting(lines, html_limit - 300, _html_line)
    text = newest_fitting(lines[-_LAST_LINES:], text_limit - 100, _text_line)
    html_title, text_title = (
        f"rank {rank.rank}: {counted(shown, 'line')}"
        if shown == line_count
        else f"rank {rank.rank}: the last {shown} of {line_count:,} lines"
        for shown in (len(html), len(text))
    )
    style = _LOG if len(html) > _UNSCROLLED else ""
    body = f"<pre{style}><span>{chr(10).join(html)}</span></pre>"
    return _ReportPart(_folded(html_title, body, is_open=is_open), "\n".join([text_title, *text]))


def _upper_parts(
    facts: summary.RunFacts, view: RunState, ranks: Sequence[RankState], cause: FailureCause | None, *, live: bool
) -> Iterator[_ReportPart]:
    """All but the logs."""
    names = names_of(ranks)
    yield _head_part(facts, view)
    if view.restarts:
        yield _lines_part([*map(restart_line, view.restarts[-_MOST_RESTARTS:])])
    if view.idle_warning is not None:
        warning = narrowed(plain(view.idle_warning.text), 1500)
        yield _ReportPart(f"<pre>{escape(fitted(warning, _CALLS, escape))}</pre>", fitted(warning, _CALLS))
    if cause is not None:
        yield _ReportPart("\n".join(_html_cause(cause)), "\n".join(cause_lines(cause)))
    yield _ranks_part([*summary.rows_of(ranks, columns := logged_names(names)[:_MOST_COLUMNS], view.nodes)], columns)
    if slow := summary.step_causes(ranks, view.nodes, is_over=view.ended is not None):
        yield _lines_part(slow)
    if (profile := summary.newest_profile(ranks)) is not None:
        yield _profile_part(*profile)
    if (host := view.host) is not None:
        sizes = {"memory": host.memory, "disk": host.disk, "shared memory": host.shared_memory}
        used = (f"{name} {bytes_text(*size)}" for name, size in sizes.items() if size is not None)
        amounts = [f"CPU {host.cpu:.0f}%", *used]
        yield _ReportPart(f"<div{_GAP}>{' &nbsp; '.join(map(escape, amounts))}</div>", "  ".join(amounts))
    if names:
        yield _curves_part(ranks, names, live=live)


def _head_part(facts: summary.RunFacts, view: RunState) -> _ReportPart:
    # how its processes are started stands behind the semicolon, and is in the panel's tooltip
    name, why = narrowed(plain(facts.name), 200), narrowed(plain(facts.why.partition("; ")[0]), 300)
    # the detail of a run that goes on is why it runs the way it does, which is shown already
    is_shown = view.detail and view.detail != facts.why and view.ended is not None
    detail = f", {narrowed(plain(view.detail), 300)}" if is_shown else ""
    lasted = time_text((time.time() if view.ended is None else view.ended) - facts.started)
    tags = f"{'tag' if len(facts.tags) == 1 else 'tags'} {', '.join(map(plain, facts.tags))}" if facts.tags else ""
    parts = (view.precision, lasted, counted(view.line_count, "line"), *summary.unread_text(view), tags)
    more = ", ".join(filter(None, parts))
    return _ReportPart(
        f"<div><b>{escape(name)}</b> &nbsp; {_state(view.state)}{escape(detail)} &nbsp; {escape(more)}</div>\n"
        f"<div{_GREY}>{escape(why)}</div>",
        f"{name}  {summary.SIGNS[view.state]} {view.state}{detail}  {more}\n{why}",
    )


def _lines_part(lines: Sequence[str]) -> _ReportPart:
    return _ReportPart(f"<div{_GAP}>{'<br>'.join(map(escape, lines))}</div>", "\n".join(lines))


def _ranks_part(table: Sequence[summary.SummaryRow], columns: Sequence[str]) -> _ReportPart:
    """A row for each rank; what no rank has gets no column."""
    metrics = [narrowed(plain(name), 60) for name in columns]
    every = ("node", "rank", "state", "progress", *metrics, "device", "step")
    rows = [
        (
            (row.node,),
            (row.ranks,),
            (row.state,),
            row.progress,
            *((value,) for value in row.values),
            row.devices[:4],
            (row.steps,),
        )
        for row in table
    ]
    filled = [index for index in range(len(every)) if any(any(row[index]) for row in rows)]
    names, state = [every[index] for index in filled], every.index("state")

    def html(row: Sequence[Sequence[str]], index: int) -> str:
        return _state(row[index][0]) if index == state else "<br>".join(_coloured(escape(part)) for part in row[index])

    def text(row: Sequence[Sequence[str]], index: int) -> str:
        return f"{summary.SIGNS[row[index][0]]} {row[index][0]}" if index == state else ", ".join(row[index])

    lines = aligned([names, *([text(row, index) for index in filled] for row in rows)])
    html_rows = [[html(row, index) for index in filled] for row in rows]
    shown = first_fitting(lines, _TABLE)
    shown += left_out(len(lines), len(shown), "row")
    return _ReportPart(_html_table([*map(escape, names)], html_rows, _TABLE, "row"), "\n".join(shown))


def _profile_part(profile: StepProfile, profiled: Sequence[int]) -> _ReportPart:
    """The costliest operations of the newest profile; of several ranks, those of the first."""
    head = summary.profile_head(profile) + (f" (profiled: ranks {ranks_text(profiled)})" if len(profiled) > 1 else "")
    columns, rows = ("operation", "calls", "self time", "share"), [*map(summary.profile_row, profile.operations)]
    html, text = [f"<div{_GAP}>{escape(head)}</div>"], [head]
    if rows:
        html.append(_html_table(columns, [[*map(escape, row)] for row in rows], _TABLE, "operation"))
        text += aligned([columns, *rows])
    if profile.trace:
        text.append(f"Its trace, for Perfetto: {profile.trace}")
        html.append(f"<div{_GREY}>{escape(text[-1])}</div>")
    return _ReportPart("\n".join(html), "\n".join(text))


def _curves_part(ranks: Sequence[RankState], names: Sequence[str], *, live: bool) -> _ReportPart:
    """A row for each metric, and in HTML its curve."""
    shown = names[: 12 if live else _MOST_CURVES]
    curves = curves_of(ranks, shown, _LIVE_VALUES if live else MOST_VALUES)
    rows = [[_coloured(escape(part)) for part in summary.curve_cells(curve)] for curve in curves]
    head = ("metric", "over time", "min", "max", "last", "")
    html = [_html_table(head, rows, _CURVES, "metric", len(names))]
    text = first_fitting(aligned([*map(summary.curve_text, curves)]), _CURVES)
    text += left_out(len(names), len(text), "metric")
    logged = {*logged_names(shown)}
    # a number that was logged once has no course; where code logged nothing, all are drawn
    moving = [curve for curve in curves if curve.points > 1 and (curve.name in logged or not logged)]
    coarse = [coarsened(curve) for curve in moving[:_MOST_PICTURES]]
    drawn = [*map(picture, coarse)]
    if sum(map(saved_size, drawn)) > _PICTURES:
        # of several ranks as bands
        drawn = [picture(replace(curve, lines={}) if len(curve.ranks) > 1 else curve) for curve in coarse]
    if pictures := first_fitting(drawn, _PICTURES):
        html.append("\n".join([f"<div{_GAP}>", *pictures, *left_out(len(moving), len(pictures), "curve"), "</div>"]))
    return _ReportPart("\n".join(html), "\n".join(text))


# ------------------------------------------------------------------------------------------------------------------ HTML


def _state(state: str) -> str:
    return f'<b style="color:{_STATE_COLOURS[state]}">{summary.SIGNS[state]} {state}</b>'


def _coloured(text: str) -> str:
    """Blocks of a bar or a curve in the colour of what runs."""
    return _BLOCKS.sub(f'<span style="color:{_STATE_COLOURS["running"]}">\\g<0></span>', text)


def _html_table(names: Sequence[str], rows: Sequence[Sequence[str]], size_limit: int, noun: str, count: int = 0) -> str:
    """The first of these rows that fit, under their names, and how many more of `count` (all rows) there are."""
    # numbers stand as the page aligns them, all else to the left
    styles = ["" if all(map(_NUMBER.fullmatch, column)) else _LEFT for column in zip(*rows, strict=True)]

    def written(cells: Sequence[str]) -> str:
        # a line for each cell: in a changed report only the lines of changed cells differ
        lines = "\n".join(f"<td{style}>{cell}</td>" for cell, style in zip(cells, styles, strict=True))
        return f"<tr>\n{lines}\n</tr>"

    shown = first_fitting(map(written, ([f"<b>{name}</b>" for name in names], *rows)), size_limit)
    more = (f"<div>{line}</div>" for line in left_out(count or len(rows), len(shown) - 1, noun))
    return "\n".join(["<table>", *shown, "</table>", *more])


def _html_cause(cause: FailureCause) -> Iterator[str]:
    headline = fitted(cause.headline, _NOTES, escape)
    yield f'<div{_GAP}><b style="color:{_STATE_COLOURS["failed"]}">{summary.SIGNS["failed"]} {escape(headline)}</b></div>'
    yield f"<pre{_PRE}>{escape(fitted(cause.text, _CALLS, escape))}</pre>"
    if cause.advice:
        yield f"<div><b>{escape(fitted(cause.advice, _NOTES, escape))}</b></div>"
    if cause.last_lines:
        last = newest_fitting(cause.last_lines, _NOTES, escape)
        yield f"<div>Its last lines:</div>\n<pre>{chr(10).join(last)}</pre>"
    if others := first_fitting(map(escape, cause.others), _NOTES):
        more = left_out(len(cause.others), len(others), "line")
        yield f"<div>{'<br>'.join([*others, *more])}</div>"
    if cause.every:
        title = "all calls" if cause.rank is not None else "every rank's stack"
        every = escape(fitted("\n".join(cause.every), _EVERY, escape))
        yield _folded(title, f"<pre{_PRE}>{every}</pre>")


def _html_line(line: LogLine, label: str = "") -> str:
    text = label.format(line.rank) + as_html(narrowed(line.text, _WIDEST))
    colour = _COLOURS.get(line.meaning)
    return f'<span style="color:{colour}">{text}</span>' if colour else text


def _folded(title: str, html: str, *, is_open: bool = False) -> str:
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{escape(title)}</summary>{html}</details>"


# ------------------------------------------------------------------------------------------------------------------ text


def cause_lines(cause: FailureCause) -> Iterator[str]:
    """The lines on a failure: the first cause with its calls, what to do about it, what the other ranks did."""
    yield f"{summary.SIGNS['failed']} {fitted(cause.headline, _NOTES)}"
    yield fitted(cause.text, _CALLS)
    if cause.advice:
        yield fitted(cause.advice, _NOTES)
    if cause.last_lines:
        yield "Its last lines:"
        yield from newest_fitting([f"  {line}" for line in cause.last_lines], _NOTES)
    others = first_fitting(cause.others, _NOTES)
    yield from others
    yield from left_out(len(cause.others), len(others), "line")


def _text_line(line: LogLine, label: str = "  ") -> str:
    return label + narrowed(plain(line.text), _WIDEST_TEXT)
