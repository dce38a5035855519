// Rows in the table of ranks: of a rank, of several that say the same, of a node.

import { chip, div, h, meter, set, setStyle, setText, show, span } from "./elements.js";
import { bytes, isKnown, number, ofBytes } from "./format.js";
import { labelOf, progressOf, progressText, shareDone, shareOf } from "./progress.js";
import { memoryStrip, phaseStrip } from "./step_phases.js";
import { END_STATES } from "./store.js";

/** A rank's row in the table of ranks. */
export class RankRow {
  /** `last` is the last of several ranks that share the row. */
  constructor(rank, pick, last = rank) {
    const folds = last > rank;
    const name = folds ? `ranks ${rank}–${last}` : `rank ${rank}`;
    this.chip = chip();
    this.fill = div("anb-fill");
    this.label = span("anb-bar-label");
    this.text = span("anb-bar-text");
    this.bar = h(
      "div",
      { class: "anb-bar", role: "progressbar", "aria-label": `${name} progress`, "aria-valuemin": 0, "aria-valuemax": 100 },
      this.fill, this.label, this.text,
    );
    this.metrics = [];
    this.busy = meter(`${name} device utilisation`);
    this.memory = meter(`${name} device memory`);
    this.busyText = span("anb-num anb-busy");
    this.memoryText = span("anb-num");
    this.busy.element.classList.add("anb-busy");
    this.device = span("anb-device");
    this.coordinates = span("anb-device anb-coordinates");
    this.name = h(
      "button",
      { type: "button", class: folds ? "anb-rank anb-rank-btn anb-ranks-btn" : `anb-rank anb-rank-btn anb-r${rank % 8}`, onclick: pick, title: folds ? "show each rank" : `show the output of ${name}`, "aria-label": folds ? `${name}: show each` : `${name}: show its output` },
      folds ? `${rank}–${last}` : String(rank),
    );
    const cell = (name, ...inside) => h("div", { class: `anb-cell ${name}`, role: "cell" }, ...inside);
    this.steps = phaseStrip(`${name} step`);
    this.parts = memoryStrip(`${name} memory`);
    this.stepsAt = cell("anb-steps-cell", this.steps.element, this.parts.element);
    this.deviceAt = cell("anb-device-cell", this.coordinates, this.device, this.busy.element, this.busyText, this.memory.element, this.memoryText);
    this.element = h(
      "div",
      { class: "anb-row", role: "row" },
      h("div", { class: "anb-cell", role: "rowheader" }, this.name), cell("", this.chip.element), cell("anb-bar-cell", this.bar), this.stepsAt, this.deviceAt,
    );
  }

  /** `late` says how far it is behind the others; a `silent` run has no speed. */
  draw(rankState, names, late = "", silent = false) {
    this.chip.set(rankState.state);
    set(this.chip.element, "title", rankState.detail || rankState.state);
    this.element.classList.toggle("anb-late", late !== "");
    this.drawBar(rankState, late, silent);
    this.drawMetrics(rankState, names);
    show(this.steps.element, Boolean(rankState.steps));
    if (rankState.steps) this.steps.set(rankState.steps);
    show(this.parts.element, Boolean(rankState.memory));
    if (rankState.memory) this.parts.set(rankState.memory);
    this.drawDevice(rankState);
  }

  drawBar(rankState, late, silent) {
    const { bar, outer } = progressOf(rankState);
    const share = shareOf(bar);
    this.bar.classList.toggle("anb-none", !bar);
    this.bar.classList.toggle("anb-endless", Boolean(bar && !bar.total && !bar.closed));
    const prefix = outer ? `${labelOf(outer, true)} · ` : "";
    // its process is in the tooltip of its state
    const detail = rankState.detail.startsWith("process ") ? "" : rankState.detail;
    setText(this.label, bar ? `${prefix}${[bar.label, bar.note].filter(Boolean).join(" · ")}` : detail);
    const text = bar ? progressText(silent ? { ...bar, rate: null } : bar, !END_STATES.has(rankState.state)) : "";
    setText(this.text, late ? `${late} · ${text}` : text);
    setStyle(this.fill, "transform", `scaleX(${share.toFixed(4)})`);
    set(this.bar, "aria-valuenow", Math.round(share * 100));
    set(this.bar, "aria-valuetext", bar ? `${bar.label} ${text}${late && `, ${late}`}` : detail || rankState.state);
  }

  drawMetrics(rankState, names) {
    while (this.metrics.length < names.length) {
      const cell = h("div", { class: "anb-cell anb-num anb-metric", role: "cell" });
      this.metrics.push(cell);
      this.element.insertBefore(cell, this.stepsAt);
    }
    names.forEach((name, i) => {
      const value = rankState.newest.get(name);
      const [least, most] = rankState.spread?.get(name) ?? [value, value];
      setText(this.metrics[i], number(least) === number(most) ? number(value) : `${number(least)}–${number(most)}`);
      set(this.metrics[i], "data-name", name);
      this.metrics[i].classList.toggle("anb-bad", value !== undefined && !Number.isFinite(value));
    });
  }

  drawDevice(rankState) {
    const device = rankState.devices.values().next().value;
    show(this.deviceAt, Boolean(device || rankState.coordinates));
    setText(this.coordinates, rankState.coordinates);
    show(this.coordinates, Boolean(rankState.coordinates));
    if (!device) return void set(this.deviceAt, "title", rankState.coordinates);
    setText(this.device, device.device + (rankState.devices.size > 1 ? ` +${rankState.devices.size - 1}` : ""));
    const [busy, used, total] = [device.utilisation, device.used, device.total];
    // what is not known yet keeps its place, so that nothing beside it moves
    this.busy.element.classList.toggle("anb-unknown", !isKnown(busy));
    setText(this.busyText, isKnown(busy) ? `${Math.round(busy)} %` : "");
    if (isKnown(busy)) this.busy.set(busy / 100, `${Math.round(busy)} %`, false); // a busy device is a good thing
    const memory = !isKnown(used) ? "" : total ? ofBytes(used, total) : bytes(used);
    show(this.memory.element, Boolean(total));
    setText(this.memoryText, total && used / total > 0.9 ? `⚠ ${memory}` : memory);
    if (total) this.memory.set(used / total, memory);
    set(this.deviceAt, "title", [rankState.coordinates && `place in the mesh: ${rankState.coordinates}`, this.device.textContent, this.busyText.textContent && `${this.busyText.textContent} busy`, this.memoryText.textContent].filter(Boolean).join("\n"));
  }
}

const FEWEST = 5; // ranks that are worth folding

/** The ranks in their order, those that say the same together where they are many enough: `[[rankState, …], …]`. */
export function rankGroups(ranks, late, fewest = FEWEST) {
  const groups = [];
  let before = null;
  for (const rankState of ranks) {
    const alone = rankState.state === "failed" || late.has(rankState.rank);
    const key = alone ? rankState.rank : `${rankState.state} ${rankState.bars.size > 0}`;
    if (key === before) groups.at(-1).push(rankState);
    else groups.push([rankState]);
    before = key;
  }
  return groups.flatMap((group) => (group.length < fewest ? group.map((rankState) => [rankState]) : [group]));
}

/** A group as what a row shows of one rank: its slowest bar, the range of each metric, the means of steps and devices. */
export function merged(group) {
  const openBars = (rankState) => [...rankState.bars.values()].filter((bar) => !bar.closed);
  const shares = new Map(group.map((rankState) => [rankState, shareDone(openBars(rankState)) ?? 0]));
  const slowest = group.reduce((least, rankState) => (shares.get(rankState) < shares.get(least) ? rankState : least));
  const { bar } = progressOf(slowest);
  const same = group.map((rankState) => progressOf(rankState).bar).filter((other) => other && bar && other.label === bar.label && other.total === bar.total);
  const bars = new Map([...slowest.bars].map(([name, value]) => [name, value === bar ? { ...bar, ahead: Math.max(...same.map(({ done }) => done)) } : value]));
  return {
    ...slowest, detail: `${group.length} ranks`, coordinates: "", bars,
    spread: rangesOf(group), steps: meanSteps(group), memory: fullest(group), devices: meanDevice(group),
  };
}

/** name -> [least, most] of the newest values. */
function rangesOf(group) {
  const ranges = new Map();
  for (const { newest } of group) {
    for (const [name, value] of newest) {
      const [least, most] = ranges.get(name) ?? [value, value];
      ranges.set(name, [Math.min(least, value), Math.max(most, value)]);
    }
  }
  return ranges;
}

function meanSteps(group) {
  const known = group.map(({ steps }) => steps).filter(Boolean);
  return known.length ? known[0].map((_, i) => mean(known.map((steps) => steps[i]))) : null;
}

/** The memory of the rank that has most in use. */
function fullest(group) {
  const size = ({ memory }) => memory?.parts.reduce((sum, part) => sum + part, 0) ?? 0;
  return group.reduce((most, rankState) => (size(rankState) > size(most) ? rankState : most)).memory;
}

/** The devices of all ranks as one: how busy they are on average, and the fullest memory. */
function meanDevice(group) {
  const all = group.flatMap(({ devices }) => [...devices.values()]);
  if (!all.length) return new Map();
  const kinds = [...new Set(all.map(({ device }) => device.split(":")[0]))];
  const busy = all.map(({ utilisation }) => utilisation).filter(isKnown);
  const fullest = all.reduce((most, item) => ((item.used ?? 0) > (most.used ?? 0) ? item : most));
  const device = `${all.length} × ${kinds.join("/")}`;
  return new Map([[device, { ...fullest, device, utilisation: busy.length ? mean(busy) : null }]]);
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

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
