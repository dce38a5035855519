// The table of ranks: a row for each, for several that say the same, for a node; an overview where they are many, and the machine they run on.

import { button, cell, chip, div, h, meter, placeByKey, section, set, setStyle, setText, show, span, tableRow } from "./elements.js";
import { bytes, isKnown, milliseconds, number, ofBytes, runsOf } from "./format.js";
import { isAutomatic } from "./series.js";
import { END_STATES, labelOf, openBars, progressOf, progressText, shareDone, shareOf, silence, stragglers, SYMBOLS } from "./store.js";

const PHASES = ["data", "forward", "backward", "communication", "optimizer", "idle"]; // as in reports/summary.py
const MEMORY = ["weights", "gradients", "optimizer", "activations", "others"]; // as in reports/summary.py

/** A strip whose parts are as wide as their shares of a total. */
function strip(label, names) {
  const parts = names.map((name) => span(`anb-phase anb-phase-${name}`));
  const element = h("div", { class: "anb-phases", role: "img" }, ...parts);
  return {
    element,
    set(sizes, total, text) {
      parts.forEach((part, i) => setStyle(part, "flexGrow", (sizes[i] / total).toFixed(3)));
      set(element, "aria-label", `${label}: ${text}`);
      set(element, "title", text);
    },
  };
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** What the colours of all strips mean. */
const legend = (title, names) => h("div", { class: "anb-legend", hidden: true }, span("", `${title}:`), ...names.map((name) => span("", span(`anb-phase anb-phase-${name}`), name)));

/** A rank's row in the table of ranks. */
class RankRow {
  /** `last` is the last of several ranks that share the row. */
  constructor(rank, pick, last = rank) {
    const folds = last > rank;
    const name = folds ? `ranks ${rank}–${last}` : `rank ${rank}`;
    this.chip = chip();
    [this.fill, this.label, this.text] = [div("anb-fill"), span("anb-bar-label"), span("anb-bar-text")];
    this.bar = h(
      "div",
      { class: "anb-bar", role: "progressbar", "aria-label": `${name} progress`, "aria-valuemin": 0, "aria-valuemax": 100 },
      this.fill, this.label, this.text,
    );
    this.metrics = [];
    this.busy = meter(`${name} device utilisation`);
    this.memory = meter(`${name} device memory`);
    for (const element of [this.busy.element, this.busy.text]) element.classList.add("anb-busy");
    this.device = span("anb-device");
    this.coordinates = span("anb-device anb-coordinates");
    this.name = h(
      "button",
      { type: "button", class: folds ? "anb-rank anb-rank-btn anb-ranks-btn" : `anb-rank anb-rank-btn anb-r${rank % 8}`, onclick: pick, title: folds ? "show each rank" : `show the output of ${name}`, "aria-label": folds ? `${name}: show each` : `${name}: show its output` },
      folds ? `${rank}–${last}` : String(rank),
    );
    this.steps = strip(`${name} step`, PHASES);
    this.parts = strip(`${name} memory`, MEMORY);
    this.stepsAt = cell("cell", "anb-steps-cell", this.steps.element, this.parts.element);
    this.deviceAt = cell("cell", "anb-device-cell", this.coordinates, this.device, this.busy.element, this.busy.text, this.memory.element, this.memory.text);
    this.element = tableRow("", cell("rowheader", "", this.name), cell("cell", "", this.chip.element), cell("cell", "anb-bar-cell", this.bar), this.stepsAt, this.deviceAt);
  }

  /** `late` says how far it is behind the others; a `silent` run has no speed. */
  draw(rankState, names, late = "", silent = false) {
    this.chip.set(rankState.state);
    set(this.chip.element, "title", rankState.detail || rankState.state);
    this.element.classList.toggle("anb-late", late !== "");
    this.drawBar(rankState, late, silent);
    while (this.metrics.length < names.length) {
      this.metrics.push(cell("cell", "anb-num anb-metric"));
      this.element.insertBefore(this.metrics.at(-1), this.stepsAt);
    }
    names.forEach((name, i) => {
      const value = rankState.newest.get(name);
      const [least, most] = rankState.spread?.get(name) ?? [value, value];
      setText(this.metrics[i], number(least) === number(most) ? number(least) : `${number(least)}–${number(most)}`);
      set(this.metrics[i], "data-name", name);
      this.metrics[i].classList.toggle("anb-bad", least !== undefined && ![least, most].every(Number.isFinite));
    });
    this.drawDevice(rankState);
    // the parts of a step, in milliseconds, and of the memory: of the whole device where that is known
    const { steps, memory } = rankState;
    show(this.steps.element, Boolean(steps));
    show(this.parts.element, Boolean(memory));
    if (steps) {
      const total = sum(steps) || 1;
      const found = PHASES.map((phase, i) => `${phase} ${Math.round((100 * steps[i]) / total)} %`).filter((text) => !text.endsWith(" 0 %"));
      this.steps.set(steps, total, `${milliseconds(total)} a step: ${found.join(", ")}`);
    }
    if (memory) this.parts.set(memory.parts, memory.total || sum(memory.parts) || 1, memory.text);
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
    if (isKnown(busy)) this.busy.set(busy / 100, `${Math.round(busy)} %`, false); // a busy device is a good thing
    else setText(this.busy.text, "");
    const memory = !isKnown(used) ? "" : total ? ofBytes(used, total) : bytes(used);
    show(this.memory.element, Boolean(total));
    if (total) this.memory.set(used / total, memory);
    else setText(this.memory.text, memory);
    set(this.deviceAt, "title", [rankState.coordinates && `place in the mesh: ${rankState.coordinates}`, this.device.textContent, this.busy.text.textContent && `${this.busy.text.textContent} busy`, this.memory.text.textContent].filter(Boolean).join("\n"));
  }
}

const FEWEST = 5; // ranks that are worth folding

/** The ranks in their order, those that say the same together where they are many enough: `[[rankState, …], …]`. */
function rankGroups(ranks, late, fewest = FEWEST) {
  const keyOf = ({ rank, state, bars }) => (state === "failed" || late.has(rank) ? rank : `${state} ${bars.size > 0}`);
  return runsOf(ranks, keyOf).flatMap((group) => (group.length < fewest ? group.map((rankState) => [rankState]) : [group]));
}

/** A group as what a row shows of one rank: its slowest bar, the range of each metric, the means of steps and devices. */
function merged(group) {
  const shares = new Map(group.map((rankState) => [rankState, shareDone(openBars(rankState)) ?? 0]));
  const slowest = group.reduce((least, rankState) => (shares.get(rankState) < shares.get(least) ? rankState : least));
  const { bar } = progressOf(slowest);
  const same = group.map((rankState) => progressOf(rankState).bar).filter((other) => other && bar && other.label === bar.label && other.total === bar.total);
  const bars = new Map([...slowest.bars].map(([name, value]) => [name, value === bar ? { ...bar, ahead: Math.max(...same.map(({ done }) => done)) } : value]));
  const spread = new Map(); // name -> [least, most] of the newest values
  for (const [name, value] of group.flatMap(({ newest }) => [...newest])) {
    const [least, most] = spread.get(name) ?? [value, value];
    spread.set(name, [Math.min(least, value), Math.max(most, value)]);
  }
  const known = group.map(({ steps }) => steps).filter(Boolean);
  const steps = known.length ? known[0].map((_, i) => mean(known.map((ofRank) => ofRank[i]))) : null;
  // of the rank that has most in use
  const inUse = ({ memory }) => sum(memory?.parts ?? []);
  const { memory } = group.reduce((most, rankState) => (inUse(rankState) > inUse(most) ? rankState : most));
  // all devices as one: how busy they are on average, and the fullest memory
  const devices = group.flatMap((rankState) => [...rankState.devices.values()]);
  const busy = devices.map(({ utilisation }) => utilisation).filter(isKnown);
  const fullest = devices.reduce((most, device) => ((device.used ?? 0) > (most.used ?? 0) ? device : most), devices[0]);
  const device = `${devices.length} × ${[...new Set(devices.map((item) => item.device.split(":")[0]))].join("/")}`;
  const one = devices.length ? [[device, { ...fullest, device, utilisation: busy.length ? mean(busy) : null }]] : [];
  return { ...slowest, detail: `${group.length} ranks`, coordinates: "", bars, spread, steps, memory, devices: new Map(one) };
}

const mean = (values) => sum(values) / values.length;

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
class NodeRow {
  constructor(node, toggle) {
    this.chip = chip();
    this.detail = span("anb-node-detail");
    this.load = span("anb-node-detail anb-node-load");
    this.name = h(
      "button", { type: "button", class: "anb-unfold anb-node-btn", "aria-expanded": "true", onclick: toggle },
      h("span", { class: "anb-chevron", "aria-hidden": "true" }), node.label,
    );
    this.element = tableRow("anb-node", cell("rowheader", "anb-node-cell", this.name, span("", ranksName(node)), this.chip.element, this.detail, this.load));
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

const LEAST_BAR = 220; // pixels
// what a table without room for its bars leaves out, in this order; at last its rows are stacked, and hold everything
const FITS = ["", "no-device-text", "no-device-text no-steps", "no-device-text no-steps no-third-metric", "stacked"];

export class Ranks {
  constructor(view) {
    Object.assign(this, { view, store: view.store });
    this.rowHeight = 27; // pixels
    this.rows = new Map(); // number of the node, and "first–last" of the ranks that share it -> RankRow
    this.nodeRows = new Map(); // node -> NodeRow
    this.unfolded = new Set(); // numbers of nodes whose ranks have a row each; null is that of a run without nodes
    this.folded = new Set(); // numbers of nodes whose ranks are out of sight
    this.cells = new Map(); // rank -> its cell of the overview
    this.meters = new Map(); // name of what the machine has -> its meter
    this.strip = h("div", { class: "anb-strip", role: "group", "aria-label": "all ranks", onkeydown: (event) => this.stripKey(event) });
    this.header = tableRow("anb-header");
    this.table = h("div", { class: "anb-table", role: "table", "aria-label": "ranks" }, this.header);
    this.box = h("div", { class: "anb-table-box", onscroll: () => this.draw() }, this.table);
    this.stepLegend = legend("step", PHASES);
    this.memoryLegend = legend("memory", MEMORY);
    this.causes = h("div", { class: "anb-causes", role: "group", "aria-label": "What makes steps slow", hidden: true });
    this.host = h("div", { class: "anb-host", role: "group", "aria-label": "this machine" });
    const foldAgain = () => {
      this.unfolded.clear();
      this.draw();
      this.table.querySelector(".anb-ranks-btn")?.focus();
    };
    this.fold = button("anb-plain-btn", "Fold", foldAgain, { title: "show ranks that say the same as one row", hidden: true });
    this.tools = div("anb-tools", this.fold);
    const stepNotes = div("anb-step-notes", this.stepLegend, this.memoryLegend, this.causes);
    this.element = section("ranks", "Ranks", this.tools, this.strip, this.box, stepNotes, this.host);
    // the columns may be wider than before where numbers are longer; what is changed now would be measured a second time
    this.sized = new ResizeObserver(() => requestAnimationFrame(() => this.fit()));
  }

  /** Gives the bars their room. In the same width nothing that was left out comes back, which would flicker with each number. */
  fit() {
    const width = this.box.clientWidth;
    const columns = `${this.header.dataset.titles} ${width}`;
    if (!width) return;
    let at = columns === this.columns ? FITS.indexOf(this.element.dataset.fit) : 0;
    this.columns = columns;
    for (; at < FITS.length; at++) {
      this.leaveOut(FITS[at]);
      if (FITS[at] === "stacked" || this.header.children[2].clientWidth >= LEAST_BAR) break;
    }
    this.rowHeight = this.table.lastChild.offsetHeight;
  }

  leaveOut(fit) {
    set(this.element, "data-fit", fit);
    const [metrics, hasSteps] = [fit.includes("no-third") ? Math.min(this.metricCount, 2) : this.metricCount, this.hasSteps && !fit.includes("no-steps")];
    setStyle(this.table, "gridTemplateColumns", `auto auto minmax(0, 1fr) repeat(${Math.max(metrics, 1)}, auto) ${hasSteps ? "minmax(60px, 90px) " : ""}auto`);
  }

  forget() {
    this.table.replaceChildren(this.header);
    for (const items of [this.rows, this.nodeRows, this.cells, this.meters]) items.clear();
    this.strip.replaceChildren();
    this.host.replaceChildren();
    delete this.header.dataset.titles;
  }

  draw() {
    const { ranks, metrics } = this.store;
    const { many } = this.view;
    const names = [...metrics.keys()].filter((name) => !isAutomatic(name)).slice(0, 3);
    const isAnew = this.drawHeader(names);
    show(this.strip, many);
    this.box.classList.toggle("anb-scrolls", many);
    set(this.box, "tabindex", many ? 0 : -1);
    // of many rows only those in sight are painted
    const first = many ? Math.floor(this.box.scrollTop / this.rowHeight) - 2 : 0;
    const late = stragglers(this.store);
    this.silent = silence(this.store) > 0;
    this.canFold = false;
    const rows = ranksOfNodes(this.store).flatMap(([node, ofNode]) => this.rowsOf(node, ofNode, names, late));
    show(this.fold, this.canFold);
    const elements = [this.header, ...rows.map(({ row }) => row.element)];
    if (elements.length !== this.table.children.length || elements.some((element, i) => element !== this.table.children[i])) {
      const was = document.activeElement;
      this.table.replaceChildren(...elements);
      // the keyboard stays where it is
      if (this.table.contains(was)) was.focus({ preventScroll: true });
    }
    rows.forEach(({ row, draw }, place) => {
      if (row.isDrawn && (place < first || place >= first + 16)) return;
      row.isDrawn = true;
      draw();
    });
    for (const [rank, square] of this.cells) if (!ranks.has(rank) && this.cells.delete(rank)) square.remove();
    if (many) for (const [rank, rankState] of ranks) this.drawCell(rank, rankState, late.get(rank));
    const { causes } = this.store;
    show(this.causes, causes.length > 0);
    if (this.shownCauses !== causes) this.causes.replaceChildren(...causes.map((cause) => div("anb-cause", h("span", { "aria-hidden": "true" }, "→ "), cause)));
    this.shownCauses = causes;
    for (const [name, used, total, unit] of this.store.host) {
      if (!this.meters.has(name)) {
        const { element, text } = this.meters.set(name, meter(name)).get(name);
        this.host.append(div("anb-host-one", span("anb-host-name", name === "cpu" ? "CPU" : name), element, text));
      }
      // a busy machine is a good thing
      this.meters.get(name).set(total ? used / total : 0, unit === "%" ? `${Math.round(used)} %` : ofBytes(used, total), name !== "cpu");
    }
    show(this.host, this.store.host.length > 0);
    if (isAnew) this.fit();
  }

  /** The rows of a node, or of a run without nodes, in their order: `[{ row, draw }, …]`. */
  rowsOf(node, ranks, names, late) {
    const number = node?.node ?? null;
    const rows = [];
    if (node) {
      const toggle = () => {
        if (!this.folded.delete(number)) this.folded.add(number);
        this.draw();
      };
      if (!this.nodeRows.has(node)) this.nodeRows.set(node, new NodeRow(node, toggle));
      const row = this.nodeRows.get(node);
      rows.push({ row, draw: () => row.draw(ranks, !this.folded.has(number), this.store.loads.get(number)) });
      if (this.folded.has(number)) return rows;
    }
    const folded = rankGroups(ranks, late, node && this.view.many ? 2 : undefined);
    const isUnfolded = this.unfolded.has(number);
    this.canFold ||= isUnfolded && folded.length < ranks.length;
    for (const group of isUnfolded ? ranks.map((rankState) => [rankState]) : folded) {
      const [{ rank }, last] = [group[0], group.at(-1).rank];
      const key = `${number} ${rank}–${last}`;
      const unfold = () => {
        this.unfolded.add(number);
        this.draw();
        // the button that was pressed has gone
        this.fold.focus();
      };
      if (!this.rows.has(key)) this.rows.set(key, new RankRow(rank, group.length > 1 ? unfold : () => this.view.output.pick(rank), last));
      const row = this.rows.get(key);
      rows.push({ row, draw: () => row.draw(group.length > 1 ? merged(group) : group[0], names, late.get(rank), this.silent) });
    }
    return rows;
  }

  /** Whether there are other columns than before. */
  drawHeader(names) {
    const ranks = [...this.store.ranks.values()];
    const devices = ranks.flatMap((rankState) => [...rankState.devices.values()]);
    const hasCoordinates = ranks.some(({ coordinates }) => coordinates);
    // where no rank's device tells how busy it is, that takes no room
    this.table.classList.toggle("anb-shows-utilisation", devices.some((device) => isKnown(device.utilisation)));
    const hasMemory = ranks.some(({ memory }) => memory);
    const hasSteps = hasMemory || ranks.some(({ steps }) => steps);
    show(this.stepLegend, ranks.some(({ steps }) => steps));
    show(this.memoryLegend, hasMemory);
    this.table.classList.toggle("anb-has-steps", hasSteps);
    const titles = ["", "state", "progress", ...names, ...(hasSteps ? [hasMemory ? "step, memory" : "step"] : []), ...(devices.length || hasCoordinates ? [hasCoordinates ? "mesh, device" : "device"] : [])];
    if (this.header.dataset.titles === titles.join()) return false;
    this.header.dataset.titles = titles.join();
    Object.assign(this, { metricCount: names.length, hasSteps });
    this.leaveOut(this.element.dataset.fit ?? "");
    this.table.classList.toggle("anb-no-metrics", !names.length);
    const ofTitle = (i) => (i < 3 ? "" : i < 3 + names.length ? "anb-num anb-metric-name" : hasSteps && i === 3 + names.length ? "anb-steps-cell" : "");
    this.header.replaceChildren(
      ...titles.map((title, i) => h("div", { class: `anb-cell ${ofTitle(i)}`, role: "columnheader", title }, title || span("anb-sr", "rank"))),
    );
    this.sized.disconnect();
    for (const element of [this.box, this.header.children[2]]) this.sized.observe(element);
    return true;
  }

  drawCell(rank, rankState, late = "") {
    let square = this.cells.get(rank);
    if (!square) {
      square = h("button", { type: "button", class: "anb-heat", tabindex: this.cells.size ? -1 : 0, onclick: () => this.view.output.pick(rank) }, div("anb-heat-fill"), span("anb-heat-text"));
      this.cells.set(rank, square);
      this.strip.append(square);
    }
    const share = shareOf(progressOf(rankState).bar);
    const text = `rank ${rank}: ${rankState.state}, ${Math.round(share * 100)} %${late && `, ${late}`}`;
    square.classList.toggle("anb-late", late !== "");
    set(square, "data-state", rankState.state);
    setStyle(square.firstChild, "transform", `scaleY(${share.toFixed(3)})`);
    setText(square.lastChild, rankState.state === "running" ? String(rank) : `${SYMBOLS[rankState.state] ?? ""}${rank}`);
    set(square, "aria-label", text);
    set(square, "title", text);
    square.classList.toggle("anb-chosen", rank === this.view.output.chosen);
  }

  stripKey(event) {
    const cells = [...this.strip.children];
    const index = cells.indexOf(document.activeElement);
    const next = index < 0 ? undefined : cells[placeByKey(event, index, cells.length)];
    if (!next) return;
    cells[index].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
