// The report that a page writes by itself of a run whose kernel has ended.

import { plain } from "./ansi.js";
import { escaped } from "./elements.js";
import { count, duration, number } from "./format.js";
import { nodeState, ranksName, ranksOfNodes } from "./node_row.js";
import { profileText } from "./profile.js";
import { progressOf, progressText } from "./progress.js";
import { SYMBOLS } from "./states.js";
import { elapsed } from "./store.js";

const SIZE_LIMIT = 290_000; // bytes of a notebook's file
const MOST_LINES_SAVED = 1000; // of all ranks together
const MOST_POINTS_SAVED = 200; // of each metric of each rank
const TEXT_LINES = 100; // of each rank, in the text

/** What a notebook keeps: text, and HTML that is the panel itself where scripts run; `parts` are the script, the code and the style. */
export async function savedReport(store, place, parts) {
  const text = reportText(store);
  const html = `<pre id="${place}">${escaped(text)}</pre>\n`;
  return { "text/plain": text, "text/html": html + (await panelScript(store, place, parts, SIZE_LIMIT - 2 * text.length)) };
}

/** The script that draws the panel in the report's place; of long output older lines are left out until there is room for it. */
async function panelScript(store, place, { script, code, css }, sizeLimit) {
  // a copy of its own: the report with the notebook's copy may be gone
  const own = script.replaceAll("$version", place).replace("$place", place).replace("$code", await gzipped(`${code}\0${css}`));
  for (let most = MOST_LINES_SAVED; most > 10; most = Math.floor(most / 2)) {
    const packed = await gzipped(JSON.stringify([snapshotOf(store, most)]));
    if (packed.length + own.length <= sizeLimit) return own.replace("$packed", packed);
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
export function snapshotOf(store, most = MOST_LINES_SAVED) {
  const ranks = [...store.ranks.values()];
  const share = Math.max(1, Math.floor(most / Math.max(ranks.length, 1)));
  const lines = ranks.flatMap((rankState) => newest(rankState.ring, share)).sort((a, b) => a.time - b.time);
  const { run, nodes, loads, state, gone, host, failure, lineCount, causes } = store;
  return {
    seq: 1, reset: true, run: { ...run, background: false, can_act: false }, state, gone, host, failure,
    nodes: nodes.map(({ node, label, first, last }) => [node, label, first, last]),
    loads: [...loads].map(([node, { cpu, used, total }]) => [node, cpu, used, total]),
    precision: store.precision || "no", causes, steps: ranks.filter(({ steps }) => steps).map(({ rank, steps }) => [rank, steps]),
    ranks: ranks.map((rankState) => [rankState.rank, rankState.state, rankState.detail, rankState.lineCount]),
    progress: ranks.flatMap((rankState) =>
      [...rankState.bars].map(([name, { label, done, total, rate, unit, closed, note }]) => [rankState.rank, label, done, total, rate, unit, closed, name, note]),
    ),
    memory: ranks.filter(({ memory }) => memory).map(({ rank, memory: { parts, total, text } }) => [rank, parts, total, text]),
    knob_changes: store.knobChanges,
    profiles: ranks.filter(({ profile }) => profile).map(({ rank, profile }) => [rank, null, profile]),
    devices: ranks.flatMap((rankState) => [...rankState.devices.values()].map(({ device, utilisation, used, total }) => [rankState.rank, device, utilisation, used, total])),
    coordinates: ranks.filter((rankState) => rankState.coordinates).map(({ rank, coordinates }) => [rank, coordinates]),
    metrics: [...store.metrics].flatMap(([name, series]) => [...series].map(([rank, curve]) => [name, rank, points(curve)])),
    lines: lines.map(({ rank, stream, text, time, meaning }) => [rank, stream, text, time, 0, meaning]),
    line_count: lineCount, skipped: Math.max(0, lineCount - lines.length),
  };
}

const newest = (ring, most) => Array.from({ length: Math.min(most, ring.length) }, (_, i) => ring.at(ring.length - Math.min(most, ring.length) + i));

/** Some points of a series, evenly, with the last; JSON knows no NaN and no infinity. */
function points(series) {
  const every = Math.ceil(series.length / MOST_POINTS_SAVED);
  const found = [];
  for (let i = 0; i < series.length - 1; i += every) found.push([series.x[i], series.y[i]]);
  if (series.last) found.push(series.last);
  return found.map(([x, y]) => [x, Number.isFinite(y) ? y : Number.isNaN(y) ? "nan" : y > 0 ? "inf" : "-inf"]);
}

// ---------------------------------------------------------------------------------------------------------------- as text

function reportText(store) {
  const { run, state, gone, failure, causes } = store;
  const ranks = [...store.ranks.values()];
  const head = `${run.name}  ${SYMBOLS[state.state] ?? ""} ${state.state}  ${duration(elapsed(store))}, ${count(store.lineCount)} lines`;
  const error = failure ? [`${failure.rank === null ? "" : `rank ${failure.rank}: `}${failure.type}: ${failure.message}`, plain(failure.traceback ?? "")] : [];
  return [[head, run.why].join("\n"), gone, ...error, ranksText(store), causes.join("\n"), profileText(ranks), ...ranks.map(lastLinesText), `All output: ${run.folder}`].filter(Boolean).join("\n\n");
}

function ranksText(store) {
  return ranksOfNodes(store).flatMap(([node, ranks]) => [...(node ? [`${node.label}  ${ranksName(node)}  ${nodeState(ranks)}`] : []), ...ranks.map(rankText)]).join("\n");
}

function rankText(rankState) {
  const { bar } = progressOf(rankState);
  const values = [...rankState.newest].map(([name, value]) => `${name} ${number(value)}`);
  return [`rank ${rankState.rank}`, rankState.state, bar ? `${bar.label} ${progressText(bar, false)}` : "", ...values].filter(Boolean).join("  ");
}

function lastLinesText(rankState) {
  const lines = newest(rankState.ring, TEXT_LINES).map((line) => `  ${plain(line.text).slice(0, 500)}`);
  return lines.length ? [`rank ${rankState.rank}: the last ${lines.length} of ${count(rankState.lineCount)} lines`, ...lines].join("\n") : "";
}
