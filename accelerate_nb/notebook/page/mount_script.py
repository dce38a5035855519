"""The script that turns a saved report into the panel itself, wherever scripts of outputs may run."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from string import Template

from accelerate_nb.notebook.display.message_feed import Message
from accelerate_nb.notebook.page import bundle
from accelerate_nb.notebook.page.metric_columns import in_columns
from accelerate_nb.notebook.page.minified import minified
from accelerate_nb.reports.size_limits import saved_size

# Packed text has no character that HTML or JSON would escape, so no log line can end the script. A place that blocks scripts
# or blobs, or a browser that is too old, leaves the static report as it is. So does a page without the report that holds
# the code: the others wait for it.
_SCRIPT = """
const bytes = $bytes;
const unpacked = text => new Response(new Blob([bytes(text)]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
const copy = (window.accelerateNbCode ??= {})["$version"] ??= {};
copy.module ??= new Promise(resolve => { copy.resolve = resolve; });
const code = "$code";
const packed = "$packed";
try {
  if (code) {
    const [text, css] = (await unpacked(code)).split("\\0");
    const url = URL.createObjectURL(new Blob([text], {type: "text/javascript"}));
    copy.resolve({mount: (await import(url)).mount, css});
    URL.revokeObjectURL(url);
  }
  const {mount, css} = await copy.module;
  const messages = JSON.parse(await unpacked(packed));
  for (const report of document.querySelectorAll('[id="$place"]')) {
    if (report.dataset.mounted) continue;
    report.dataset.mounted = "true";
    const panel = document.createElement("div");
    report.before(panel);
    try { mount(panel, messages, css); report.hidden = true; } catch (error) { panel.remove(); console.warn(error); }
  }
} catch (error) { console.warn("accelerate_nb: the report stays static.", error); }
"""
SCRIPT = Template(f'<script type="module">{minified(_SCRIPT, ["code", "packed"])}</script>')

# Two of these digits are thirteen bits: 2 % shorter than base 85, 8 % than base 64. Left out is what ends a text, or a script.
_DIGITS = "".join(letter for letter in map(chr, range(32, 127)) if letter not in '"\\&<')
_BYTES = minified(
    f"""text => {{
const digits = "{_DIGITS}", found = new Uint8Array(text.length * 13 / 16);
for (let i = 0, at = 0, bits = 0, count = 0; i < text.length; i += 2) {{
bits |= digits.indexOf(text[i]) + 91 * digits.indexOf(text[i + 1] ?? " ") << count;
for (count += 13; count > 7; count -= 8, bits >>= 8) found[at++] = bits;
}}
return found;
}}""",
    [],
)
# A page that writes a report by itself has a function for base 64.
PAGE_SCRIPT = SCRIPT.safe_substitute(bytes="text => Uint8Array.from(atob(text), c => c.charCodeAt(0))")
_BEST_PACKED = 12


def script(element_id: str, messages: list[Message], size_limit: int, *, with_code: bool, entry: str = "mount") -> str:
    """
    The script that mounts the panel over the element `element_id`, of at most `size_limit` bytes of a notebook's file.

    Without the code it waits for another report in the page that has the same code. Of lines and points, older ones
    are left out until it fits; it is empty where even the rest does not. `entry` is the module that mounts.
    """
    version, code = _packed_code(entry)
    while True:
        plain = json.dumps([in_columns(message) for message in messages], separators=(",", ":")).encode()
        # what is this much larger would not fit, and takes seconds to pack
        if len(plain) <= _BEST_PACKED * size_limit:
            made = SCRIPT.substitute(
                bytes=_BYTES, version=version, code=code if with_code else "", packed=_packed(plain), place=element_id
            )
            if saved_size(made) <= size_limit:
                return made
        if not any(message.get("lines") or message.get("metrics") for message in messages):
            return ""
        messages = [_lighter(message) for message in messages]


@cache
def _packed_code(entry: str) -> tuple[str, str]:
    """A name of the panel's code, which differs where the code does, and the code."""
    plain = f"{bundle.bare_module(entry)}\0{bundle.bare_style()}".encode()
    return hashlib.sha256(plain).hexdigest()[:12], _packed(plain)


def _packed(plain: bytes) -> str:
    # without a time: the same run is saved as the same bytes
    return _digits(gzip.compress(plain, compresslevel=9, mtime=0))


def _digits(packed: bytes) -> str:
    number = int.from_bytes(packed, "little")
    groups = [int(digits, 2) for digits in _groups(f"{number:0{8 * len(packed)}b}")]
    text = "".join(_DIGITS[group % 91] + _DIGITS[group // 91] for group in groups)
    # the second of the last two says nothing where the first has all bits that are left
    return text[:-1] if (8 * len(packed)) % 13 in range(1, 6) else text


def _groups(bits: str) -> Iterator[str]:
    """Thirteen bits after the other, from the last."""
    return (bits[max(0, end - 13) : end] for end in range(len(bits), 0, -13))


def _lighter(message: Message) -> Message:
    """A message with half of its lines, the newest, each shorter, and with half of each metric's points."""
    lines = message.get("lines", [])
    kept = lines[(len(lines) + 1) // 2 :]
    cut = [[rank, stream, text[:2000], *rest] for rank, stream, text, *rest in kept]
    lighter = {**message, "skipped": message.get("skipped", 0) + len(lines) - len(kept), "lines": cut}
    if metrics := message.get("metrics"):
        lighter["metrics"] = [
            [name, rank, [*points[:-1:2], *points[-1:]]] for name, rank, points in metrics if len(points) > 1
        ]
    return lighter
