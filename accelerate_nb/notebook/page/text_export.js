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

/** Saves a chart's canvas as a picture, on the ground that it has in the panel. */
export function savePicture(name, canvas, { ground }) {
  const whole = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
  const pen = whole.getContext("2d");
  pen.fillStyle = ground;
  pen.fillRect(0, 0, whole.width, whole.height);
  pen.drawImage(canvas, 0, 0);
  whole.toBlob((blob) => saveBlob(`${name.replace(/[^\w.-]+/g, "_")}.png`, blob));
}

export function saveFile({ name, text }, buffers) {
  saveBlob(name, new Blob([buffers?.[0] ?? text ?? ""], { type: "text/plain" }));
}

function saveBlob(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
