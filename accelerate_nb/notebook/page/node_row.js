// The nodes of a run on several of them: their ranks, and their heading in the table of ranks.

import { chip } from "./controls.js";
import { h, setText, set, span } from "./elements.js";
import { ofBytes } from "./format.js";
import { progressOf, progressText } from "./progress.js";
import { merged } from "./rank_groups.js";
import { END_STATES } from "./states.js";

// of ranks in several states the first of these is their node's
const LEADING = ["failed", "stopping", "running", "starting", "stopped"];

/** The ranks of each node in their order, `[[node, [rankState, …]], …]`; of a run without nodes all ranks under null. */
export function ranksOfNodes({ nodes, ranks }) {
  const all = [...ranks.values()];
  if (nodes.length < 2) return [[null, all]];
  return nodes.map((node) => [node, all.filter(({ rank }) => node.first <= rank && rank <= node.last)]);
}

export function nodeState(ranks) {
  const states = new Set(ranks.map(({ state }) => state));
  return LEADING.find((state) => states.has(state)) ?? "finished";
}

/** "ranks 0–3" */
export const ranksName = ({ first, last }) => (first === last ? `rank ${first}` : `ranks ${first}–${last}`);

/** A node's heading, above the rows of its ranks: a button that folds them away. */
export class NodeRow {
  constructor(node, toggle) {
    this.node = node;
    this.chip = chip();
    this.detail = span("anb-node-detail");
    this.load = span("anb-node-detail anb-node-load");
    this.name = h(
      "button", { type: "button", class: "anb-unfold anb-node-btn", "aria-expanded": "true", onclick: toggle },
      h("span", { class: "anb-chevron", "aria-hidden": "true" }), node.label,
    );
    this.element = h(
      "div", { class: "anb-row anb-node", role: "row" },
      h("div", { class: "anb-cell anb-node-cell", role: "rowheader" }, this.name, span("", ranksName(node)), this.chip.element, this.detail, this.load),
    );
  }

  draw(ranks, isOpen, load) {
    set(this.name, "aria-expanded", isOpen);
    setText(this.load, load ? `CPU ${Math.round(load.cpu)} % · memory ${ofBytes(load.used, load.total)}` : "");
    if (!ranks.length) return;
    const state = nodeState(ranks);
    this.chip.set(state);
    // while its ranks are out of sight, how far the slowest is
    const { bar } = isOpen ? {} : progressOf(merged(ranks));
    setText(this.detail, bar ? progressText(bar, !END_STATES.has(state)) : "");
  }
}
