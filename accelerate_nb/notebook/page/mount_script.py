"""The script that turns a saved report into the panel itself, wherever scripts of outputs may run."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import string
from functools import cache
from string import Template

from accelerate_nb.notebook.display.message_feed import Message
from accelerate_nb.notebook.page import bundle
from accelerate_nb.reports.size_limits import saved_size

# Packed text has no character that HTML or JSON would escape, so no log line can end the script. A place that blocks scripts
# or blobs, or a browser that is too old, leaves the static report as it is. So does a page without the report that holds
# the code: the others wait for it.
SCRIPT = Template("""<script type="module">
const bytes = $bytes;
const unpacked = async text => (await new Response(new Blob([bytes(text)]).stream()
  .pipeThrough(new DecompressionStream("gzip"))).json());
const newCopy = () => { const copy = {}; copy.module = new Promise(resolve => { copy.resolve = resolve; }); return copy; };
const copy = (window.accelerateNbCode ??= {})["$version"] ??= newCopy();
const code = "$code";
const packed = "$packed";
try {
  if (code) {
    const {text, css} = await unpacked(code);
    const url = URL.createObjectURL(new Blob([text], {type: "text/javascript"}));
    copy.resolve({mount: (await import(url)).mount, css});
    URL.revokeObjectURL(url);
  }
  const {mount, css} = await copy.module;
  const messages = await unpacked(packed);
  for (const report of document.querySelectorAll('[id="$place"]')) {
    if (report.dataset.mounted) continue;
    report.dataset.mounted = "true";
    const panel = document.createElement("div");
    report.before(panel);
    try { mount(panel, messages, css); report.hidden = true; } catch (error) { panel.remove(); console.warn(error); }
  }
} catch (error) { console.warn("accelerate_nb: the report stays static.", error); }
</script>""")


# Base 85 is 6 % shorter than base 64. These are RFC 1924's digits, with others for those that mean something to HTML,
# to templates or to JavaScript's `replace`.
_OTHERS = str.maketrans("<>&$`", ",.:[]")
_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase + "!#$%&()*+-;<=>?@^_`{|}~".translate(_OTHERS)
_BASE_85 = f"""text => {{
const digits = "{_DIGITS}";
const values = [...text.padEnd(5 * Math.ceil(text.length / 5), "~")].map(digit => digits.indexOf(digit));
const found = new DataView(new ArrayBuffer(values.length * 4 / 5));
for (let i = 0; i < values.length; i += 5) found.setUint32(i * 4 / 5, values.slice(i, i + 5).reduce((sum, value) => 85 * sum + value));
return new Uint8Array(found.buffer, 0, Math.floor(text.length * 4 / 5));
}}"""
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
        plain = json.dumps(messages).encode()
        # what is this much larger would not fit, and takes seconds to pack
        if len(plain) <= _BEST_PACKED * size_limit:
            made = SCRIPT.substitute(
                bytes=_BASE_85, version=version, code=code if with_code else "", packed=_packed(plain), place=element_id
            )
            if saved_size(made) <= size_limit:
                return made
        if not any(message.get("lines") or message.get("metrics") for message in messages):
            return ""
        messages = [_lighter(message) for message in messages]


@cache
def _packed_code(entry: str) -> tuple[str, str]:
    """A name of the panel's code, which differs where the code does, and the code."""
    plain = json.dumps({"text": bundle.bare_module(entry), "css": bundle.bare_style()}).encode()
    return hashlib.sha256(plain).hexdigest()[:12], _packed(plain)


def _packed(plain: bytes) -> str:
    # without a time: the same run is saved as the same bytes
    return base64.b85encode(gzip.compress(plain, compresslevel=9, mtime=0)).decode().translate(_OTHERS)


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
