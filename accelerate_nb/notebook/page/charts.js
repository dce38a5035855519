// All charts together: which there are, painted in turn, with one crosshair and one zoom; or their numbers as a table.

import { Chart, groupName } from "./chart.js";
import { button, cell, copyButton, div, foldButton, h, saveFile, section, set, setStyle, show, tableRow } from "./elements.js";
import { count, number } from "./format.js";
import { Axis, epochsOf, inOrder, isAutomatic, newestOf, SUMMED, Total } from "./series.js";

const CHART_TIME = 25; // ms that charts may take of one painting
const FEW_LINES_IN_A_CHART = 2; // up to here each rank is a line, beyond they are a band
const MANY_CHARTS = 3; // from here on a filter helps

export class Charts {
  constructor(view) {
    Object.assign(this, { view, store: view.store });
    this.charts = new Map(); // name -> Chart
    this.lineNames = view.lineNames ?? null; // where lines are other things than ranks, and never a band
    this.bandChosen = this.lineNames ? false : null; // null until a person chooses
    Object.assign(this, { cross: null, pointed: null, turn: 0, axis: new Axis("step", this.store) });
    this.zoom = null; // the part of the axis that is shown: [from, to]
    this.smoothing = 0; // the weight of what came before in the averages that are drawn; 0 draws none
    this.groups = new Map(); // prefix of names -> ChartGroup
    this.totals = new Map(); // name -> Total, of what all ranks have the sum of
    this.grid = div("anb-chart-groups");
    this.numbers = h("div", { class: "anb-numbers", tabindex: "0", role: "group", "aria-label": "numbers of the charts", hidden: true });
    // what can be done with all charts at once: which are shown, over what, how smooth, as what else
    const filter = () => {
      for (const [name, chart] of this.charts) show(chart.element, this.fits(name));
      for (const group of this.groups.values()) group.fit();
    };
    const toggleTable = () => {
      [this.grid.hidden, this.numbers.hidden] = [this.numbers.hidden, this.grid.hidden];
      this.view.draw();
    };
    const smoothing = h("input", { type: "range", class: "anb-range", min: 0, max: 0.99, step: 0.01, value: 0, "aria-label": "smoothing", title: "smoothing: the weight of earlier values in a moving average", oninput: () => this.redraw({ smoothing: Number(smoothing.value) }) });
    const csv = button("anb-plain-btn", "CSV", () => saveFile(`${this.store.run.name || "run"}.csv`, asCsv(this.store)), { title: "save the values that the page has" });
    // also those that the page thins out
    const dataFrame = () => `import pandas as pd\n\nmetrics = pd.read_json(${JSON.stringify(`${this.store.run.folder}/metrics.jsonl`)}, lines=True)\n`;
    this.search = h("input", { type: "search", class: "anb-search anb-filter", placeholder: "filter charts", "aria-label": "filter charts", oninput: filter });
    this.axes = h("select", { class: "anb-select", "aria-label": "axis of the charts", title: "what the charts are drawn over", onchange: () => this.redraw({ axis: new Axis(this.axes.value, this.store), zoom: null }) });
    this.showAll = button("anb-plain-btn", "Show all", () => this.setZoom(null), { title: "end the zoom; a double click on a chart does the same" });
    this.bandButton = button("anb-plain-btn", "Band", () => this.redraw({ bandChosen: !this.band }), { title: "mean and range of all ranks, instead of a line for each" });
    this.tableButton = button("anb-plain-btn", "Table", toggleTable, { title: "the numbers as a table" });
    this.frameButton = copyButton("Copy as DataFrame", dataFrame, this.view, { title: "copy a line of code that reads all values with pandas" });
    const tools = div("anb-tools", this.search, h("label", { class: "anb-smoothing" }, "smooth", smoothing), this.axes, this.showAll, this.bandButton, this.tableButton, csv, this.frameButton);
    this.element = section("metrics", "Metrics", tools, this.grid, this.numbers);
    show(this.element, false); // not even until the first painting
    this.sight = new IntersectionObserver((entries) => {
      for (const entry of entries) entry.target.anbChart.visible = entry.isIntersecting;
      view.draw();
    });
    // asked for a size after a change, the browser would lay the page out anew: it tells of those that are others
    this.sized = new ResizeObserver((entries) => {
      for (const { target } of entries) Object.assign(target.anbChart, { width: target.clientWidth, height: target.clientHeight });
      view.draw();
    });
  }

  /** Whether a chart of this name is shown: its name holds what is searched, in any case. */
  fits(name) {
    return name.toLowerCase().includes(this.search.value.toLowerCase());
  }

  forget() {
    for (const chart of this.charts.values()) chart.plotted?.destroy();
    for (const items of [this.charts, this.totals, this.groups]) items.clear();
    this.grid.replaceChildren();
    this.axis = new Axis(this.axis.kind, this.store);
    this.zoom = this.cross = null;
  }

  /** Whether ranks are shown as one band rather than as a line each. */
  get band() {
    return this.bandChosen ?? this.store.ranks.size > FEW_LINES_IN_A_CHART;
  }

  /** The lines of a metric: of each rank, or of all of them together. */
  linesOf(name) {
    const series = this.store.metrics.get(name) ?? new Map();
    if (!this.isTotal(name)) return series;
    if (this.totals.get(name)?.size !== series.size) this.totals.set(name, new Total(series.size));
    return this.totals.get(name).updated(series);
  }

  isTotal(name) {
    return !this.lineNames && SUMMED.has(name) && this.store.metrics.get(name)?.size > 1;
  }

  /** What the number of a metric is of several ranks: "sum of 2", "mean of 2". */
  howOf(name) {
    const size = this.store.metrics.get(name)?.size ?? 0;
    return size < 2 ? "" : `${this.isTotal(name) ? "sum" : "mean"} of ${size}`;
  }

  setZoom(zoom) {
    this.redraw({ zoom });
    if (zoom) this.view.announce(`from ${this.axis.marks(zoom).join(" to ")}`);
  }

  /** Draws all charts with what was chosen for them anew: their axis, its zoom, how smooth, lines or a band. */
  redraw(chosen) {
    Object.assign(this, chosen, { cross: null });
    for (const chart of this.charts.values()) if (chart.visible) chart.draw();
    this.view.draw();
  }

  moveCross(x, chart = null) {
    this.cross = x;
    this.pointed = chart;
    for (const other of this.charts.values()) if (other.visible) other.drawCross();
  }

  draw() {
    const names = inOrder(this.store.metrics.keys());
    show(this.element, names.length > 0);
    if (this.axis.kind === "epoch" && this.axis.epochs === null) this.axis = new Axis("epoch", this.store);
    const kinds = ["step", "time", ...(epochsOf(this.store) ? ["epoch"] : [])];
    if (this.axes.options.length !== kinds.length) {
      this.axes.replaceChildren(...kinds.map((kind) => h("option", { value: kind }, kind)));
      this.axes.value = this.axis.kind;
    }
    show(this.search, this.charts.size >= MANY_CHARTS || this.search.value !== "");
    show(this.showAll, this.zoom !== null);
    show(this.bandButton, this.store.ranks.size > 1 && !this.lineNames);
    show(this.frameButton, this.store.run.folder !== "");
    set(this.bandButton, "aria-pressed", this.band);
    set(this.tableButton, "aria-pressed", !this.numbers.hidden);
    for (const name of names) if (!this.charts.has(name)) this.add(name);
    if (!this.numbers.hidden) return void this.drawNumbers(names);
    for (const chart of this.charts.values()) {
      this.groups.get(groupName(chart.name)).place(chart);
      if (chart.isNumber || (chart.visible && chart.drawn)) chart.drawValues();
      else if (chart.visible) chart.draw();
    }
  }

  /** A chart, in the group of its prefix: names without one come first, what ranks report by themselves last. */
  add(name) {
    const chart = new Chart(name, this);
    chart.plot.anbChart = chart;
    for (const watch of [this.sight, this.sized]) watch.observe(chart.plot);
    this.charts.set(name, chart);
    show(chart.element, this.fits(name));
    const [prefix, automatic] = [groupName(name), isAutomatic(name)];
    if (!this.groups.has(prefix)) {
      const group = new ChartGroup(prefix, automatic);
      const next = prefix === "" ? this.grid.firstChild : automatic ? null : [...this.groups.values()].find((other) => other.automatic)?.element;
      this.grid.insertBefore(group.element, next ?? null);
      this.groups.set(prefix, group);
    }
    this.groups.get(prefix).charts.push(chart);
    // its values, whether it is in sight or not
    chart.drawValues();
  }

  /** In turn, and only for so long at a time: whether all had theirs; the others wait a little rather than the person. */
  paint() {
    if (!this.numbers.hidden) return true;
    const charts = [...this.charts.values()].filter((chart) => chart.visible);
    const until = performance.now() + CHART_TIME;
    for (let i = 0; i < charts.length; i++) {
      if (performance.now() > until) return false;
      charts[this.turn++ % charts.length].paintChanges();
    }
    return true;
  }

  /** The table that says what the charts show. */
  drawNumbers(names) {
    const titles = ["metric", this.lineNames ? "run" : "rank", "min", "max", "last", "last step", "values"];
    const head = tableRow("anb-header", ...titles.map((title, i) => cell("columnheader", i ? "anb-num" : "", title)));
    const body = names.flatMap((name) => {
      const [lines, how] = [this.linesOf(name), this.howOf(name)];
      const rows = [...lines].map(([rank, curve]) => [this.lineNames?.[rank] ?? (this.isTotal(name) ? how : String(rank)), curve.least, curve.most, curve.last?.[1], curve.last?.[0], curve.pointCount]);
      const { value, step } = newestOf(lines);
      if (how && !this.isTotal(name) && !this.lineNames) rows.push([how, Math.min(...rows.map((line) => line[1])), Math.max(...rows.map((line) => line[2])), value, step, rows.reduce((sum, line) => sum + line[5], 0)]);
      return rows.map(([of, ...values]) => tableRow("", cell("rowheader", "", name), cell("cell", "anb-num", of), ...values.map((item, i) => cell("cell", "anb-num", i === 4 ? count(item) : number(item)))));
    });
    const table = h("div", { class: "anb-table anb-numbers-table", role: "table", "aria-label": "metrics" }, head, ...body);
    if (table.textContent !== this.numbers.textContent) this.numbers.replaceChildren(table);
  }
}

/** The charts of metrics whose names begin alike, under a heading that folds. */
class ChartGroup {
  constructor(prefix, automatic) {
    Object.assign(this, { prefix, automatic, charts: [] }); // charts in their order
    this.numbers = div("anb-numbers-row"); // metrics of one point
    this.grid = div("anb-charts");
    this.head = foldButton("anb-unfold anb-group-head", prefix, true, this.numbers, this.grid);
    show(this.head, prefix !== "");
    this.element = div("anb-chart-group", this.head, this.numbers, this.grid);
  }

  /** A number that has come once stands in a row with others; with the second it is a chart. */
  place(chart) {
    const row = chart.isNumber ? this.numbers : this.grid;
    if (chart.element.parentNode === row) return;
    const next = this.charts.slice(this.charts.indexOf(chart) + 1).find(({ element }) => element.parentNode === row);
    row.insertBefore(chart.element, next?.element ?? null);
    this.fit();
  }

  /** A group without a chart in sight takes no room. */
  fit() {
    const shown = this.charts.filter(({ element }) => !element.hidden);
    const charts = shown.filter(({ isNumber }) => !isNumber).length || 1;
    show(this.element, shown.length > 0);
    // small groups share a row
    if (this.prefix) setStyle(this.element, "flex", `${charts} 1 ${charts * 230}px`);
  }
}

/** All values that the page has, a line each. */
function asCsv({ metrics }) {
  const lines = ["name,rank,step,time,value"];
  for (const [name, series] of metrics) {
    const quoted = /[",\n]/.test(name) ? `"${name.replaceAll('"', '""')}"` : name;
    for (const [rank, { x, y, t, length }] of series) for (let i = 0; i < length; i++) lines.push([quoted, rank, x[i], t[i], y[i]].join());
  }
  return `${lines.join("\n")}\n`;
}
