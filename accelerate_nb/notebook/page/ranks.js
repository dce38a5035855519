// The table of ranks, with an overview where they are many, and the machine they run on.

import { isAutomatic } from "./axes.js";
import { button, div, h, meter, section, set, setStyle, setText, show, span } from "./elements.js";
import { isKnown, ofBytes } from "./format.js";
import { progressOf, shareOf } from "./progress.js";
import { merged, NodeRow, rankGroups, RankRow, ranksOfNodes } from "./rank_row.js";
import { StepNotes } from "./step_phases.js";
import { SYMBOLS } from "./store.js";

const LEAST_BAR = 220; // pixels
// what a table without room for its bars leaves out, in this order; at last its rows are stacked, and hold everything
const FITS = ["", "no-device-text", "no-device-text no-steps", "no-device-text no-steps no-third-metric", "stacked"];

export class Ranks {
  constructor(view) {
    this.view = view;
    this.store = view.store;
    this.rowHeight = 27; // pixels
    this.rows = new Map(); // "first–last" of the ranks that share it -> RankRow
    this.nodeRows = new Map(); // number of a node -> NodeRow
    this.unfolded = new Set(); // numbers of nodes whose ranks have a row each; null is that of a run without nodes
    this.folded = new Set(); // numbers of nodes whose ranks are out of sight
    this.cells = new Map(); // rank -> its cell of the overview
    this.meters = new Map(); // name of what the machine has -> its meter
    this.strip = h("div", { class: "anb-strip", role: "group", "aria-label": "all ranks", onkeydown: (event) => this.stripKey(event) });
    this.header = h("div", { class: "anb-row anb-header", role: "row" });
    this.table = h("div", { class: "anb-table", role: "table", "aria-label": "ranks" }, this.header);
    this.box = div("anb-table-box", this.table);
    this.box.addEventListener("scroll", () => this.draw());
    this.stepNotes = new StepNotes();
    this.host = h("div", { class: "anb-host", role: "group", "aria-label": "this machine" });
    this.fold = button("anb-plain-btn", "Fold", () => this.foldAgain(), { title: "show ranks that say the same as one row" });
    show(this.fold, false);
    this.tools = div("anb-tools", this.fold);
    this.element = section("ranks", "Ranks", this.tools, this.strip, this.box, this.stepNotes.element, this.host);
    // the columns may be wider than before where numbers are longer; what is changed now would be measured a second time
    this.sized = new ResizeObserver(() => requestAnimationFrame(() => this.fit()));
  }

  close() {
    this.sized.disconnect();
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
    const late = this.view.progress?.stragglers(this.store) ?? new Map();
    this.silent = this.view.progress?.silence(this.store) > 0;
    this.canFold = false;
    const rows = ranksOfNodes(this.store).flatMap(([node, ofNode]) => this.rowsOf(node, ofNode, names, late));
    show(this.fold, this.canFold);
    this.arrange(rows.map(({ row }) => row));
    rows.forEach(({ row, draw }, place) => {
      if (row.isDrawn && (place < first || place >= first + 16)) return;
      row.isDrawn = true;
      draw();
    });
    if (many) for (const [rank, rankState] of ranks) this.drawCell(rank, rankState, late.get(rank));
    this.stepNotes.draw(this.store);
    this.drawHost();
    if (isAnew) this.fit();
  }

  /** The rows of a node, or of a run without nodes, in their order: `[{ row, draw }, …]`. */
  rowsOf(node, ranks, names, late) {
    const number = node?.node ?? null;
    const rows = [];
    if (node) {
      const row = this.nodeRowOf(node);
      rows.push({ row, draw: () => row.draw(ranks, !this.folded.has(number), this.store.loads.get(number)) });
      if (this.folded.has(number)) return rows;
    }
    const folded = rankGroups(ranks, late, node && this.view.many ? 2 : undefined);
    const isUnfolded = this.unfolded.has(number);
    this.canFold ||= isUnfolded && folded.length < ranks.length;
    for (const group of isUnfolded ? ranks.map((rankState) => [rankState]) : folded) {
      const row = this.rowOf(group);
      rows.push({ row, draw: () => row.draw(group.length > 1 ? merged(group) : group[0], names, late.get(group[0].rank), this.silent) });
    }
    return rows;
  }

  nodeRowOf(node) {
    const known = this.nodeRows.get(node.node);
    if (known?.node === node) return known;
    const row = new NodeRow(node, () => this.toggleNode(node.node));
    this.nodeRows.set(node.node, row);
    return row;
  }

  rowOf(group) {
    const [{ rank }, last] = [group[0], group.at(-1).rank];
    const key = `${rank}–${last}`;
    if (!this.rows.has(key)) this.rows.set(key, new RankRow(rank, () => (group.length > 1 ? this.unfold(rank) : this.view.pick(rank)), last));
    return this.rows.get(key);
  }

  /** Puts rows in their order; only where that has changed, and the keyboard stays where it is. */
  arrange(rows) {
    const elements = [this.header, ...rows.map((row) => row.element)];
    if (elements.length === this.table.children.length && elements.every((element, i) => element === this.table.children[i])) return;
    const was = document.activeElement;
    this.table.replaceChildren(...elements);
    if (this.table.contains(was)) was.focus({ preventScroll: true });
  }

  toggleNode(number) {
    if (!this.folded.delete(number)) this.folded.add(number);
    this.draw();
  }

  /** Gives each of the ranks that share a row one of its own. */
  unfold(rank) {
    const [node] = ranksOfNodes(this.store).find(([, ranks]) => ranks.some((rankState) => rankState.rank === rank));
    this.unfolded.add(node?.node ?? null);
    this.draw();
    // the button that was pressed has gone
    this.fold.focus();
  }

  foldAgain() {
    this.unfolded.clear();
    this.draw();
    this.table.querySelector(".anb-ranks-btn")?.focus();
  }

  /** Whether there are other columns than before. */
  drawHeader(names) {
    const devices = [...this.store.ranks.values()].flatMap((rankState) => [...rankState.devices.values()]);
    const hasCoordinates = [...this.store.ranks.values()].some((rankState) => rankState.coordinates);
    // where no rank's device tells how busy it is, that takes no room
    this.table.classList.toggle("anb-shows-utilisation", devices.some((device) => isKnown(device.utilisation)));
    const hasSteps = [...this.store.ranks.values()].some((rankState) => rankState.steps || rankState.memory);
    const hasMemory = [...this.store.ranks.values()].some((rankState) => rankState.memory);
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
    let cell = this.cells.get(rank);
    if (!cell) {
      const pick = () => this.view.pick(rank);
      cell = h("button", { type: "button", class: "anb-heat", tabindex: this.cells.size ? -1 : 0, onclick: pick }, div("anb-heat-fill"), span("anb-heat-text"));
      this.cells.set(rank, cell);
      this.strip.append(cell);
    }
    const share = shareOf(progressOf(rankState).bar);
    const text = `rank ${rank}: ${rankState.state}, ${Math.round(share * 100)} %${late && `, ${late}`}`;
    cell.classList.toggle("anb-late", late !== "");
    set(cell, "data-state", rankState.state);
    setStyle(cell.firstChild, "transform", `scaleY(${share.toFixed(3)})`);
    setText(cell.lastChild, rankState.state === "running" ? String(rank) : `${SYMBOLS[rankState.state] ?? ""}${rank}`);
    set(cell, "aria-label", text);
    set(cell, "title", text);
    cell.classList.toggle("anb-chosen", rank === this.view.chosen);
  }

  stripKey(event) {
    const cells = [...this.strip.children];
    const index = cells.indexOf(document.activeElement);
    const goal = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: cells.length - 1 }[event.key];
    if (goal === undefined || index < 0) return;
    event.preventDefault();
    const next = cells[(goal + cells.length) % cells.length];
    cells[index].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  drawHost() {
    for (const [name, used, total, unit] of this.store.host) {
      let gauge = this.meters.get(name);
      if (!gauge) {
        gauge = { meter: meter(name), text: span("anb-num") };
        this.meters.set(name, gauge);
        this.host.append(div("anb-host-one", span("anb-host-name", name === "cpu" ? "CPU" : name), gauge.meter.element, gauge.text));
      }
      const share = total ? used / total : 0;
      const text = unit === "%" ? `${Math.round(used)} %` : ofBytes(used, total);
      const alarms = name !== "cpu"; // a busy machine is a good thing
      gauge.meter.set(share, text, alarms);
      setText(gauge.text, alarms && share > 0.9 ? `⚠ ${text}` : text);
    }
    show(this.host, this.store.host.length > 0);
  }
}
