// The colours that stand behind and in the panel, read from the notebook's theme.

import { h, set } from "./elements.js";

/**
 * Marks the panel as light or dark and returns its colours as a canvas takes them; `key` tells one theme from another.
 *
 * Light or dark is read from the colour that stands behind the panel, whatever the notebook calls its themes.
 */
export function readTheme(root) {
  const [red, green, blue] = pixel(resolved(root, "--anb-bg"));
  set(root, "data-anb-theme", 0.299 * red + 0.587 * green + 0.114 * blue < 128 ? "dark" : "light");
  const style = getComputedStyle(root);
  const ranks = Array.from({ length: 8 }, (_, i) => style.getPropertyValue(`--anb-c${i}`).trim());
  const [accent, dim, grid, ground, bad] = ["--anb-accent", "--anb-dim", "--anb-line", "--anb-bg", "--anb-bad"].map((name) => resolved(root, name));
  return { ranks, accent, band: `color-mix(in srgb, ${accent} 22%, transparent)`, dim, grid, ground, bad, font: style.fontFamily, key: [accent, dim, grid, ranks[0]].join() };
}

function resolved(root, name) {
  const probe = h("span", { style: `color:var(${name})` });
  root.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

/** Red, green and blue of a computed colour, however it is written. */
function pixel(colour) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  return pen.getImageData(0, 0, 1, 1).data;
}
