// All charts together: which there are, painted in turn, with one crosshair and one zoom; or their numbers as a table.

import { Chart, groupName } from "./chart.js";
import { button, copyButton, div, foldButton, h, saveFile, section, set, setStyle, setText, show } from "./elements.js";
import { count, number } from "./format.js";
import { Axis, epochsOf, inOrder, isAutomatic, newestOf, SUMMED, Total } from "./series.js";

const CHART_TIME = 25; // ms that charts may take of one painting
const FEW_LINES_IN_A_CHART = 2; // up to here each rank is a line, beyond they are a band
const MANY_CHARTS = 3; // from here on a filter helps

export class Charts {
  constructor(view) {
    this.view = view;
    this.store = view.store;
    this.charts = new Map(); // name -> Chart
    this.lineNames = view.lineNames ?? null; // where lines are other things than ranks, and never a band
    this.band = this.lineNames ? false : null; // until ranks are known
    this.bandChosen = this.lineNames !== null;
    this.cross = null;
    this.pointed = null;
    this.turn = 0;
    this.axis = new Axis("step", this.store);
    this.zoom = null; // the part of the axis that is shown: [from, to]
    this.smoothing = 0; // the weight of what came before in the averages that are drawn; 0 draws none
    this.look = ""; // changes with axis, zoom and smoothing
    this.groups = new Map(); // prefix of names -> ChartGroup
    this.totals = new Map(); // name -> Total, of what all ranks have the sum of
    this.tools = new ChartTools(this);
    this.grid = div("anb-chart-groups");
    this.numbers = h("div", { class: "anb-numbers", tabindex: "0", role: "group", "aria-label": "numbers of the charts" });
    show(this.numbers, false);
    this.element = section("metrics", "Metrics", this.tools.element, this.grid, this.numbers);
    show(this.element, false);
    this.sight = new IntersectionObserver((entries) => {
      for (const entry of entries) entry.target.anbChart.visible = entry.isIntersecting;
      view.draw();
    });
    this.sized = new ResizeObserver(() => {
      for (const chart of this.charts.values()) chart.measure();
      view.draw();
    });
    this.sized.observe(this.grid);
  }

  get palette() {
    return this.view.palette;
  }

  announce(text, again) {
    this.view.announce(text, again);
  }

  close() {
    this.sight.disconnect();
    this.sized.disconnect();
    for (const chart of this.charts.values()) chart.plotted?.destroy();
  }

  forget() {
    for (const chart of this.charts.values()) {
      this.sight.unobserve(chart.plot);
      this.sized.unobserve(chart.plot);
      chart.close();
    }
    this.charts.clear();
    this.totals.clear();
    for (const group of this.groups.values()) group.element.remove();
    this.groups.clear();
    this.axis = new Axis(this.axis.kind, this.store);
    this.setZoom(null);
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
    this.zoom = zoom;
    this.redraw();
    this.tools.draw();
    if (zoom) this.announce(`from ${this.axis.marks(zoom).join(" to ")}`, true);
  }

  redraw() {
    this.cross = null;
    this.look = [this.axis.kind, this.zoom, this.smoothing].join();
    for (const chart of this.charts.values()) if (chart.visible) chart.draw(true);
  }

  themed() {
    for (const chart of this.charts.values()) chart.draw();
  }

  moveCross(x, chart = null) {
    this.cross = x;
    this.pointed = chart;
    for (const other of this.charts.values()) if (other.visible) other.drawCross();
  }

  draw() {
    const { metrics, ranks } = this.store;
    show(this.element, inOrder(metrics.keys()).length > 0);
    if (!this.bandChosen) this.band = ranks.size > FEW_LINES_IN_A_CHART;
    if (this.axis.kind === "epoch" && this.axis.epochs === null) this.axis = new Axis("epoch", this.store);
    this.tools.draw();
    for (const name of inOrder(metrics.keys())) if (!this.charts.has(name)) this.add(name);
    if (!this.numbers.hidden) this.drawNumbers();
    else {
      for (const chart of this.charts.values()) {
        this.groups.get(groupName(chart.name)).place(chart);
        if (chart.isNumber || (chart.visible && chart.drawn)) chart.drawValues();
        else if (chart.visible) chart.draw();
      }
    }
  }

  add(name) {
    const chart = new Chart(name, this);
    chart.plot.anbChart = chart;
    this.sight.observe(chart.plot);
    this.sized.observe(chart.plot);
    this.charts.set(name, chart);
    const prefix = groupName(name);
    if (!this.groups.has(prefix)) this.addGroup(prefix, isAutomatic(name));
    this.groups.get(prefix).add(chart);
    show(chart.element, this.tools.fits(name));
  }

  /** A group for names with a prefix: those without one come first, what ranks report by themselves last. */
  addGroup(prefix, automatic) {
    const group = new ChartGroup(prefix, automatic);
    const groups = [...this.groups.values()];
    const next = prefix === "" ? groups[0] : automatic ? undefined : groups.find((other) => other.automatic);
    this.grid.insertBefore(group.element, next?.element ?? null);
    const at = next ? groups.indexOf(next) : groups.length;
    groups.splice(at, 0, group);
    this.groups = new Map(groups.map((item) => [item.prefix, item]));
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
  drawNumbers() {
    const cell = (role, text, name = "anb-num") => h("div", { class: `anb-cell ${name}`, role }, text);
    const row = (...cells) => h("div", { class: "anb-row", role: "row" }, ...cells);
    const head = row(...["metric", this.lineNames ? "run" : "rank", "min", "max", "last", "last step", "values"].map((text, i) => cell("columnheader", text, i ? "anb-num" : "")));
    head.classList.add("anb-header");
    const { metrics } = this.store;
    const body = inOrder(metrics.keys()).flatMap((name) => {
      const [lines, how] = [this.linesOf(name), this.howOf(name)];
      const rows = [...lines].map(([rank, curve]) => [this.lineNames?.[rank] ?? (this.isTotal(name) ? how : String(rank)), curve.least, curve.most, curve.last?.[1], curve.last?.[0], curve.pointCount]);
      const { value, step } = newestOf(lines);
      if (how && !this.isTotal(name) && !this.lineNames) rows.push([how, Math.min(...rows.map((line) => line[1])), Math.max(...rows.map((line) => line[2])), value, step, rows.reduce((sum, line) => sum + line[5], 0)]);
      return rows.map(([of, ...values]) => row(cell("rowheader", name, ""), cell("cell", of), ...values.map((item, i) => cell("cell", i === 4 ? count(item) : number(item)))));
    });
    const table = h("div", { class: "anb-table anb-numbers-table", role: "table", "aria-label": "metrics" }, head, ...body);
    if (table.textContent !== this.numbers.textContent) this.numbers.replaceChildren(table);
  }
}

/** What can be done with all charts at once: which are shown, over what, how smooth, as what else. */
class ChartTools {
  constructor(charts) {
    this.charts = charts;
    const filter = () => {
      for (const [name, chart] of charts.charts) show(chart.element, this.fits(name));
      for (const group of charts.groups.values()) group.fit();
    };
    const smooth = () => {
      charts.smoothing = Number(this.smoothing.value);
      charts.redraw();
    };
    const chooseAxis = () => {
      charts.axis = new Axis(this.axis.value, charts.store);
      charts.setZoom(null);
    };
    const toggleBand = () => {
      Object.assign(charts, { band: !charts.band, bandChosen: true });
      for (const chart of charts.charts.values()) chart.draw(true);
      this.draw();
    };
    const toggleTable = () => {
      [charts.grid.hidden, charts.numbers.hidden] = [charts.numbers.hidden, charts.grid.hidden];
      charts.view.draw();
    };
    this.filter = h("input", { type: "search", class: "anb-search anb-filter", placeholder: "filter charts", "aria-label": "filter charts", oninput: filter });
    this.smoothing = h("input", { type: "range", class: "anb-range", min: 0, max: 0.99, step: 0.01, value: 0, "aria-label": "smoothing", title: "smoothing: the weight of earlier values in a moving average", oninput: smooth });
    this.axis = h("select", { class: "anb-select", "aria-label": "axis of the charts", title: "what the charts are drawn over", onchange: chooseAxis });
    this.all = button("anb-plain-btn", "Show all", () => charts.setZoom(null), { title: "end the zoom; a double click on a chart does the same" });
    this.band = button("anb-plain-btn", "Band", toggleBand, { "aria-pressed": "false", title: "mean and range of all ranks, instead of a line for each" });
    this.table = button("anb-plain-btn", "Table", toggleTable, { "aria-pressed": "false", title: "the numbers as a table" });
    this.csv = button("anb-plain-btn", "CSV", () => saveFile({ name: `${charts.store.run.name || "run"}.csv`, text: asCsv(charts.store) }), { title: "save the values that the page has" });
    this.frame = copyButton("Copy as DataFrame", () => asDataFrame(charts.store), (text) => charts.announce(text));
    set(this.frame, "title", "copy a line of code that reads all values with pandas");
    this.element = div("anb-tools", this.filter, h("label", { class: "anb-smoothing" }, "smooth", this.smoothing), this.axis, this.all, this.band, this.table, this.csv, this.frame);
  }

  /** Whether a chart of this name is shown: its name holds what is searched, in any case. */
  fits(name) {
    return name.toLowerCase().includes(this.filter.value.toLowerCase());
  }

  draw() {
    const { charts } = this;
    const axes = epochsOf(charts.store) ? ["step", "time", "epoch"] : ["step", "time"];
    if (this.axis.options.length !== axes.length) {
      this.axis.replaceChildren(...axes.map((kind) => h("option", { value: kind }, kind)));
      this.axis.value = charts.axis.kind;
    }
    show(this.filter, charts.charts.size >= MANY_CHARTS || this.filter.value !== "");
    show(this.all, charts.zoom !== null);
    show(this.band, charts.store.ranks.size > 1 && !charts.lineNames);
    show(this.frame, charts.store.run.folder !== "");
    set(this.band, "aria-pressed", Boolean(charts.band));
    set(this.table, "aria-pressed", !charts.numbers.hidden);
    if (this.frame.textContent !== "Copied") setText(this.frame, "Copy as DataFrame");
  }
}

/** The charts of metrics whose names begin alike, under a heading that folds. */
class ChartGroup {
  constructor(prefix, automatic) {
    this.prefix = prefix;
    this.automatic = automatic;
    this.charts = []; // in their order
    this.numbers = div("anb-numbers-row"); // metrics of one point
    this.grid = div("anb-charts");
    this.head = foldButton("anb-unfold anb-group-head", prefix, true, this.numbers, this.grid);
    show(this.head, prefix !== "");
    this.element = div("anb-chart-group", this.head, this.numbers, this.grid);
  }

  add(chart) {
    this.charts.push(chart);
    this.place(chart);
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

const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

/** All values that the page has, a line each. */
function asCsv({ metrics }) {
  const lines = ["name,rank,step,time,value"];
  for (const [name, series] of metrics) {
    for (const [rank, { x, y, t, length }] of series) for (let i = 0; i < length; i++) lines.push([quoted(name), rank, x[i], t[i], y[i]].join());
  }
  return `${lines.join("\n")}\n`;
}

/** Python that reads every value of the run, also those that the page thins out. */
function asDataFrame({ run }) {
  return `import pandas as pd\n\nmetrics = pd.read_json(${JSON.stringify(`${run.folder}/metrics.jsonl`)}, lines=True)\n`;
}
