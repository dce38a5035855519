// The report that a page writes by itself of a run whose kernel has ended.

import { plain } from "./ansi.js";
import { escaped } from "./elements.js";
import { count, duration, number } from "./format.js";
import { nodeState, ranksName, ranksOfNodes } from "./node_row.js";
import { profileText } from "./profile.js";
import { progressOf, progressText } from "./progress.js";
import { SYMBOLS } from "./states.js";
import { elapsed } from "./store.js";

const MOST_LINES_SAVED = 100; // of each rank

/** What a notebook keeps of it: the text of all that a store knows but its curves, which are in the run's folder. */
export function savedReport(store) {
  const text = reportText(store);
  return { "text/plain": text, "text/html": `<pre>${escaped(text)}</pre>\n` };
}

function reportText(store) {
  const { run, state, gone, failure, causes } = store;
  const ranks = [...store.ranks.values()];
  const head = `${run.name}  ${SYMBOLS[state.state] ?? ""} ${state.state}  ${duration(elapsed(store))}, ${count(store.lineCount)} lines`;
  const error = failure ? [`${failure.rank === null ? "" : `rank ${failure.rank}: `}${failure.type}: ${failure.message}`, plain(failure.traceback ?? "")] : [];
  return [[head, run.why].join("\n"), gone, ...error, ranksText(store), causes.join("\n"), profileText(ranks), ...ranks.map(lastLinesText), run.folder && `All output: ${run.folder}\naccelerate_nb.attach(${JSON.stringify(run.folder)}) shows it again, with its curves.`].filter(Boolean).join("\n\n");
}

function ranksText(store) {
  return ranksOfNodes(store).flatMap(([node, ranks]) => [...(node ? [`${node.label}  ${ranksName(node)}  ${nodeState(ranks)}`] : []), ...ranks.map(rankText)]).join("\n");
}

function rankText(rankState) {
  const { bar } = progressOf(rankState);
  const values = [...rankState.newest].map(([name, value]) => `${name} ${number(value)}`);
  return [`rank ${rankState.rank}`, rankState.state, bar ? `${bar.label} ${progressText(bar, false)}` : "", ...values].filter(Boolean).join("  ");
}

const newest = (ring, most) => Array.from({ length: Math.min(most, ring.length) }, (_, i) => ring.at(ring.length - Math.min(most, ring.length) + i));

function lastLinesText(rankState) {
  const lines = newest(rankState.ring, MOST_LINES_SAVED).map((line) => `  ${plain(line.text).slice(0, 500)}`);
  return lines.length ? [`rank ${rankState.rank}: the last ${lines.length} of ${count(rankState.lineCount)} lines`, ...lines].join("\n") : "";
}
