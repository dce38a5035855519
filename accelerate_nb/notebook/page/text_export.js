// Text that leaves the page: to the clipboard, or as a file.

import { button, h, setText } from "./elements.js";

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // no clipboard on a page served over plain http: the old way
    const area = h("textarea", { "aria-hidden": "true", style: "position:fixed;opacity:0" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** A button that copies what `text` returns, and says so. */
export function copyButton(label, text, announce) {
  const copy = button("anb-plain-btn", label, async () => {
    const was = document.activeElement;
    await copyText(text());
    was?.focus?.();
    setText(copy, "Copied");
    announce("Copied");
    setTimeout(() => setText(copy, label), 1200);
  });
  return copy;
}

export function saveFile({ name, text }, buffers) {
  const blob = new Blob([buffers?.[0] ?? text ?? ""], { type: "text/plain" });
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
