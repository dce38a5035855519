// One line of a log as a row.

import { ansi } from "./ansi.js";
import { h, span } from "./elements.js";
import { clockTime } from "./format.js";

// what is no alarm has a faint sign
const SIGNS = { error: ["✖", "error"], warning: ["!", "warning"], stderr: ["╎", "standard error"] };

/** Fills a row: gutter (time, rank, what it means) and the coloured text, with what was searched marked. */
export function fillRow(row, line, { showRank, times, query }) {
  const gutter = [];
  if (times) gutter.push(span("anb-time", clockTime(line.time)));
  if (showRank() && line.rank !== null) gutter.push(span(`anb-rank anb-r${line.rank % 8}`, String(line.rank)));
  const kind = line.meaning || (line.stream ? "stderr" : line.rank === null ? "aside" : "");
  const [sign, title] = SIGNS[kind] ?? [];
  gutter.push(sign ? h("span", { class: "anb-mark", title }, sign, span("anb-sr", ` ${title} `)) : span("anb-mark"));
  row.className = "anb-line";
  row.dataset.means = kind;
  row.replaceChildren(...gutter, span("anb-text", ...pieces(line.text, query), "\n"));
}

function pieces(text, query) {
  const parts = ansi(text);
  const hits = query ? places(parts.map((part) => part.text).join(""), query) : [];
  const nodes = [];
  let at = 0;
  for (const part of parts) {
    for (const [piece, hit] of cut(part.text, at, hits, query?.length ?? 0)) {
      if (!hit && !part.css) nodes.push(document.createTextNode(piece));
      else nodes.push(h(hit ? "mark" : "span", { class: hit ? "anb-hit" : null, style: part.css || null }, piece));
    }
    at += part.text.length;
  }
  return nodes;
}

/** Where `query` (lower case) occurs; nowhere where lower case has another length than the text. */
function places(text, query) {
  const low = text.toLowerCase();
  const found = [];
  if (low.length !== text.length) return found;
  for (let i = low.indexOf(query); i >= 0 && found.length < 500; i = low.indexOf(query, i + query.length)) found.push(i);
  return found;
}

/** A piece of text that begins at `at`, cut where hits of a length begin and end: `[[piece, isHit]]`. */
function cut(text, at, hits, length) {
  const out = [];
  let from = 0;
  for (const hit of hits) {
    const [start, end] = [Math.max(0, hit - at), Math.min(text.length, hit + length - at)];
    if (end <= 0 || start >= text.length) continue;
    if (start > from) out.push([text.slice(from, start), false]);
    out.push([text.slice(start, end), true]);
    from = end;
  }
  if (from < text.length) out.push([text.slice(from), false]);
  return out;
}
