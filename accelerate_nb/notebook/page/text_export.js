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

/** Saves a chart's canvas as a picture with its title, the name of its axis and a legend, on the ground that it has in the panel. */
export function savePicture(name, canvas, { ground, dim, font }, axis, legend) {
  const ratio = window.devicePixelRatio || 1;
  const [width, under] = [canvas.width / ratio, canvas.height / ratio + 26];
  const inRow = legend.length > 1 ? Math.max(1, Math.floor(width / 80)) : 1;
  const whole = Object.assign(document.createElement("canvas"), { width: canvas.width, height: (under + 20 + 16 * Math.ceil(legend.length / inRow)) * ratio });
  const pen = whole.getContext("2d");
  pen.fillStyle = ground;
  pen.fillRect(0, 0, whole.width, whole.height);
  pen.drawImage(canvas, 0, 26 * ratio);
  pen.scale(ratio, ratio);
  const write = (text, x, y, size = 11) => {
    pen.fillStyle = dim;
    pen.font = `${size}px ${font}`;
    pen.fillText(text, x, y);
  };
  write(name, 8, 18, 14);
  write(axis, width / 2, under - 3);
  legend.forEach(([colour, text], i) => {
    const [x, y] = [8 + (i % inRow) * 80, under + 16 + 16 * Math.floor(i / inRow)];
    pen.fillStyle = colour;
    pen.fillRect(x, y - 6, 14, 4);
    write(text, x + 20, y);
  });
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
