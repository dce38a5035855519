// The ranks' stacks; those that are elsewhere than the others stand out.

import { div, h } from "./elements.js";

/** The ranks' stacks; those that are elsewhere than the others stand out. */
export function stackBlocks(text) {
  const blocks = [];
  for (const line of text.split("\n")) {
    if (/^rank \d+/.test(line) || !blocks.length) blocks.push({ odd: line.includes("◀"), lines: [] });
    blocks.at(-1).lines.push(line);
  }
  return blocks;
}

export function stacksView(text) {
  return stackBlocks(text).map(({ odd, lines }) =>
    div(odd ? "anb-stack anb-odd" : "anb-stack", div("anb-stack-head", lines[0]), lines.length > 1 ? h("div", { class: "anb-stack-lines" }, lines.slice(1).join("\n")) : null),
  );
}
