// The report that a page writes of a run by itself: of a kernel that has ended, nobody else can.

import { plain } from "./ansi.js";
import { count, duration, number } from "./format.js";
import { progressOf, progressText } from "./progress.js";
import { SYMBOLS } from "./states.js";
import { elapsed } from "./store.js";

const ROOM = 290_000; // bytes of a notebook's file
const KEPT_LINES = 1000; // of all ranks together
const KEPT_POINTS = 200; // of each metric of each rank
const TEXT_LINES = 100; // of each rank, in the text

/** What a notebook keeps: text, and HTML that is the panel itself where scripts run; `parts` are the script, the code and the style. */
export async function keptReport(store, place, parts) {
  const text = reportText(store);
  const html = `<pre id="${place}">${escaped(text)}</pre>\n`;
  return { "text/plain": text, "text/html": html + (await panelScript(store, place, parts, ROOM - 2 * text.length)) };
}

/** The script that draws the panel in the report's place; of long output older lines are left out until there is room for it. */
async function panelScript(store, place, { script, code, css }, room) {
  for (let most = KEPT_LINES; most > 10; most = Math.floor(most / 2)) {
    const packed = await gzipped(JSON.stringify({ code, css, messages: [frozen(store, most)] }));
    if (packed.length + script.length <= room) return script.replace("$packed", () => packed).replace("$place", place);
  }
  return "";
}

async function gzipped(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("gzip"));
  const found = new Uint8Array(await new Response(stream).arrayBuffer());
  let letters = "";
  for (let i = 0; i < found.length; i += 8192) letters += String.fromCharCode(...found.subarray(i, i + 8192));
  return btoa(letters);
}

/** All that a store knows as one message. */
export function frozen(store, most = KEPT_LINES) {
  const ranks = [...store.ranks.values()];
  const share = Math.max(1, Math.floor(most / Math.max(ranks.length, 1)));
  const lines = ranks.flatMap((known) => newest(known.ring, share)).sort((a, b) => a.time - b.time);
  const { run, state, gone, host, failure, lineCount } = store;
  return {
    seq: 1, reset: true, run: { ...run, background: false, can_act: false }, state, gone, host, failure,
    ranks: ranks.map((known) => [known.rank, known.state, known.detail, known.lineCount]),
    progress: ranks.flatMap((known) =>
      [...known.bars].map(([name, { label, done, total, rate, unit, closed, note }]) => [known.rank, label, done, total, rate, unit, closed, name, note]),
    ),
    devices: ranks.flatMap((known) => [...known.devices.values()].map(({ device, utilisation, used, total }) => [known.rank, device, utilisation, used, total])),
    metrics: [...store.metrics].flatMap(([name, series]) => [...series].map(([rank, one]) => [name, rank, points(one)])),
    lines: lines.map(({ rank, stream, text, time }) => [rank, stream, text, time, 0]),
    line_count: lineCount, skipped: Math.max(0, lineCount - lines.length),
  };
}

const newest = (ring, most) => Array.from({ length: Math.min(most, ring.length) }, (_, i) => ring.at(ring.length - Math.min(most, ring.length) + i));

/** Some points of a series, evenly, with the last; JSON knows no NaN and no infinity. */
function points(series) {
  const every = Math.ceil(series.length / KEPT_POINTS);
  const found = [];
  for (let i = 0; i < series.length - 1; i += every) found.push([series.x[i], series.y[i]]);
  if (series.last) found.push(series.last);
  return found.map(([x, y]) => [x, Number.isFinite(y) ? y : Number.isNaN(y) ? "nan" : y > 0 ? "inf" : "-inf"]);
}

// ---------------------------------------------------------------------------------------------------------------- as text

function reportText(store) {
  const { run, state, gone, failure } = store;
  const ranks = [...store.ranks.values()];
  const head = `${run.name}  ${SYMBOLS[state.state] ?? ""} ${state.state}  ${duration(elapsed(store))}, ${count(store.lineCount)} lines`;
  const error = failure ? [`${failure.rank === null ? "" : `rank ${failure.rank}: `}${failure.type}: ${failure.message}`, plain(failure.traceback ?? "")] : [];
  return [[head, run.why].join("\n"), gone, ...error, ranks.map(rankText).join("\n"), ...ranks.map(tailText), `All output: ${run.folder}`].filter(Boolean).join("\n\n");
}

function rankText(known) {
  const { bar } = progressOf(known);
  const values = [...known.newest].map(([name, value]) => `${name} ${number(value)}`);
  return [`rank ${known.rank}`, known.state, bar ? `${bar.label} ${progressText(bar, false)}` : "", ...values].filter(Boolean).join("  ");
}

function tailText(known) {
  const lines = newest(known.ring, TEXT_LINES).map((line) => `  ${plain(line.text).slice(0, 500)}`);
  return lines.length ? [`rank ${known.rank}: the last ${lines.length} of ${count(known.lineCount)} lines`, ...lines].join("\n") : "";
}

const escaped = (text) => text.replace(/[&<>"]/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);
