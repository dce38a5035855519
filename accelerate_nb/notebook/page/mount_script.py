"""The script that turns a saved report into the panel itself, wherever scripts of outputs may run."""

from __future__ import annotations

import base64
import gzip
import json
from string import Template

from accelerate_nb.notebook.display.message_feed import Message
from accelerate_nb.notebook.page import bundle
from accelerate_nb.reports.size_limits import saved_size

# Base 64 has no character that HTML or JSON would escape, so no log line can end the script. A place that blocks scripts
# or blobs, or a browser that is too old, leaves the static report as it is.
SCRIPT = Template("""<script type="module">
const unpacked = async text => (await new Response(new Blob([Uint8Array.from(atob(text), c => c.charCodeAt(0))]).stream()
  .pipeThrough(new DecompressionStream("gzip"))).json());
const packed = "$packed";
try {
  const {code, css, messages} = await unpacked(packed);
  const url = URL.createObjectURL(new Blob([code], {type: "text/javascript"}));
  const {mount} = await import(url);
  URL.revokeObjectURL(url);
  for (const report of document.querySelectorAll('[id="$place"]')) {
    if (report.dataset.mounted) continue;
    report.dataset.mounted = "true";
    const panel = document.createElement("div");
    report.before(panel);
    try { mount(panel, messages, css); report.hidden = true; } catch (error) { panel.remove(); console.warn(error); }
  }
} catch (error) { console.warn("accelerate_nb: the report stays static.", error); }
</script>""")


_BEST_PACKED = 12


def script(element_id: str, messages: list[Message], size_limit: int) -> str:
    """
    The script that mounts the panel over the element `element_id`, of at most `size_limit` bytes of a notebook's file.

    Of lines and points, older ones are left out until it fits; it is empty where even the rest does not.
    """
    page = {"code": bundle.bare_module(), "css": bundle.bare_style()}
    while True:
        plain = json.dumps({**page, "messages": messages}).encode()
        # what is this much larger would not fit, and takes seconds to pack
        if len(plain) <= _BEST_PACKED * size_limit:
            # without a time: the same run is saved as the same bytes
            packed = base64.b64encode(gzip.compress(plain, compresslevel=9, mtime=0)).decode()
            made = SCRIPT.substitute(packed=packed, place=element_id)
            if saved_size(made) <= size_limit:
                return made
        if not any(message.get("lines") or message.get("metrics") for message in messages):
            return ""
        messages = [_lighter(message) for message in messages]


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
