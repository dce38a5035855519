"""The pieces of HTML in the picker's form: headings, marks, texts to copy."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import product
from math import prod
from pathlib import Path

from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.events.event_types import CheckResult
from accelerate_nb.reports.text_format import bytes_text, counted

# A press copies the text beside the button; pages that are not served securely have no clipboard of their own.
_COPY = (
    "const t=this.closest('.acc-copy').querySelector('textarea');t.focus();t.select();"
    "const done=()=>{this.textContent='Copied';setTimeout(()=>{this.textContent='Copy'},1500)};"
    "if(navigator.clipboard&&window.isSecureContext){navigator.clipboard.writeText(t.value).then(done)}"
    "else if(document.execCommand('copy')){done()}"
)
# Where a browser does not fit a text's height by itself, about so many characters are a row.
_WIDTH, _MOST_ROWS = 44, 14
# More ranks than these are counted, not drawn.
_MOST_RANKS = 64
# A notebook takes plain letters for shortcuts (`d d` deletes a cell) also from a list or a box that has the focus.
_KEEP_KEYS = (
    "this.closest('.acc-picker')?.addEventListener('focusin',e=>{"
    "if(!e.target.matches('input[type=text]'))e.target.dataset.lmSuppressShortcuts='true'})"
)
_MARKS = {"waiting": "○", "running": "◌", "passed": "✓", "failed": "✗", "left out": "–"}


def style() -> str:
    """The form's style sheet, in the colours of the notebook's theme, and the handler that keeps key presses in the form."""
    rules = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    return f'<style onload="{escape(_KEEP_KEYS)}">{rules}</style>'


def heading(text: str, note: str = "") -> str:
    """A group's title, with what is to be known of the whole group."""
    about = f'<div class="acc-help">{escape(note)}</div>' if note else ""
    return f'<div class="acc-heading" role="heading" aria-level="3">{escape(text)}</div>{about}'


def title(devices: AvailableDevices, memory: int, accelerator_memory: Sequence[int]) -> str:
    """The form's head: what this machine has to compute with."""
    facts = [
        accelerators(devices, accelerator_memory),
        counted(devices.cores, "CPU core"),
        f"{bytes_text(memory)} of memory",
    ]
    items = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    return (
        '<div class="acc-title" role="heading" aria-level="2">Pick a configuration</div>'
        f'<ul class="acc-facts" aria-label="This machine">{items}</ul>'
    )


def accelerators(devices: AvailableDevices, memory: Sequence[int]) -> str:
    """The accelerators of a machine, in words."""
    if devices.trouble:
        return f"no {devices.label} to compute on"
    if not devices.count:
        return "No GPU found, using the CPU"
    item = f" with {bytes_text(min(memory))}" if memory else ""
    return counted(devices.count, devices.label) + item + (" each" if item and devices.count > 1 else "")


def help_line(text: str, default: str, unsupported: Sequence[str]) -> str:
    """The help of a setting."""
    more = f" Default: <code>{escape(default)}</code>." if default else ""
    not_yet = f" Not offered yet: {escape(', '.join(unsupported))}." if unsupported else ""
    return f'<div class="acc-help">{escape(text)}{more}{not_yet}</div>'


def remark(text: str, *, grave: bool) -> str:
    """An error or an advice on a setting; read aloud when it appears."""
    if not text:
        return ""
    style, mark = ("wrong", "✗") if grave else ("advice", "!")
    return f'<div class="acc-{style}" role="alert"><span aria-hidden="true">{mark}</span> {escape(text)}</div>'


def leads_to(why: str, not_yet: str) -> str:
    """The preview of a launch."""
    return f'<div class="acc-leads">{f"Runs {escape(why)}." if why else escape(not_yet)}</div>'


def mesh(degrees: Mapping[str, int]) -> str:
    """A drawing of the ranks that these degrees make: a table with a column for each place along the innermost axis."""
    if not degrees:
        return ""
    *outer, inner = degrees
    size = prod(degrees.values())
    title = f"{' x '.join(f'{axis} {degree}' for axis, degree in degrees.items())}: {size} ranks"
    if size > _MOST_RANKS:
        return f'<div class="acc-help">{escape(title)}</div>'
    head = "".join(f'<th scope="col">{escape(inner)} {index}</th>' for index in range(degrees[inner]))
    rows = []
    for number, place in enumerate(product(*(range(degrees[axis]) for axis in outer))):
        name = " ".join(f"{axis} {index}" for axis, index in zip(outer, place, strict=True))
        first = number * degrees[inner]
        cells = "".join(f"<td>{rank}</td>" for rank in range(first, first + degrees[inner]))
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    return (
        f'<table class="acc-mesh"><caption>{escape(title)}</caption><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def status(text: str) -> str:
    """The result of an action, read aloud in its turn."""
    return f'<div class="acc-said" role="status">{escape(text)}</div>' if text else ""


def to_copy(label: str, text: str, note: str) -> str:
    """A text with its name and a button that copies it."""
    rows = min(sum(1 + len(line) // _WIDTH for line in text.splitlines()), _MOST_ROWS) or 1
    about = f'<div class="acc-help">{escape(note)}</div>' if note else ""
    return (
        '<div class="acc-copy" data-lm-suppress-shortcuts="true"><div class="acc-copy-head">'
        f'<span class="acc-copy-name">{escape(label)}</span>'
        f'<button type="button" class="jupyter-button acc-button" aria-label="Copy: {escape(label)}"'
        f' onclick="{escape(_COPY)}"{"" if text else " disabled"}>Copy</button></div>'
        f'<textarea readonly spellcheck="false" rows="{rows}" aria-label="{escape(label)}">{escape(text)}</textarea>'
        f"{about}</div>"
    )


def checks(found: Iterable[CheckResult]) -> str:
    """The self-test as a list, a line and a mark for each check."""
    return f'<ul class="acc-checks" aria-label="Self-test">{"".join(map(_check, found))}</ul>'


def _check(check_result: CheckResult) -> str:
    about = f'<span class="acc-check-text">{escape(check_result.text)}</span>' if check_result.text else ""
    advice = f'<div class="acc-check-advice">{escape(check_result.advice)}</div>' if check_result.advice else ""
    state = check_result.state.replace(" ", "-")
    return (
        f'<li class="acc-check acc-check-{state}"><span class="acc-check-mark" role="img" aria-label="{check_result.state}">'
        f"{_MARKS[check_result.state]}</span><span>{escape(check_result.title)}</span>{about}{advice}</li>"
    )
