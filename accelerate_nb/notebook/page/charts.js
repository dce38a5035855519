// All charts together: which there are, painted in turn, with one crosshair; or their numbers as a table.

import { Chart } from "./chart.js";
import { button, div, h, set, show } from "./elements.js";
import { count, number } from "./format.js";
import { section } from "./controls.js";

const CHART_TIME = 25; // ms that charts may take of one painting
const FEW_LINES_IN_A_CHART = 8; // up to here each rank is a line, beyond they are a band

export class Charts {
  constructor(view) {
    this.view = view;
    this.store = view.store;
    this.charts = new Map(); // name -> Chart
    this.band = null; // until ranks are known
    this.bandChosen = false;
    this.cross = null;
    this.pointed = null;
    this.turn = 0;
    this.bandButton = button("anb-plain-btn", "Band", () => this.toggleBand(), { "aria-pressed": "false", title: "mean and range of all ranks, instead of a line for each" });
    this.tableButton = button("anb-plain-btn", "Table", () => this.toggleTable(), { "aria-pressed": "false", title: "the numbers as a table" });
    this.grid = div("anb-charts");
    this.numbers = h("div", { class: "anb-numbers", tabindex: "0", role: "group", "aria-label": "numbers of the charts" });
    show(this.numbers, false);
    this.element = section("metrics", "Metrics", div("anb-tools", this.bandButton, this.tableButton), this.grid, this.numbers);
    show(this.element, false);
    this.sight = new IntersectionObserver((entries) => {
      for (const entry of entries) entry.target.anbChart.visible = entry.isIntersecting;
      view.draw();
    });
    this.sized = new ResizeObserver(() => this.measure());
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
  }

  forget() {
    for (const chart of this.charts.values()) {
      this.sight.unobserve(chart.plot);
      this.sized.unobserve(chart.plot);
      chart.element.remove();
    }
    this.charts.clear();
  }

  measure() {
    for (const chart of this.charts.values()) chart.measure();
    this.view.draw();
  }

  themed() {
    for (const chart of this.charts.values()) chart.draw();
  }

  toggleBand() {
    this.band = !this.band;
    this.bandChosen = true;
    set(this.bandButton, "aria-pressed", this.band);
    for (const chart of this.charts.values()) chart.draw(true);
  }

  toggleTable() {
    const table = this.tableButton.getAttribute("aria-pressed") !== "true";
    set(this.tableButton, "aria-pressed", table);
    show(this.grid, !table);
    show(this.numbers, table);
    this.view.draw();
  }

  moveCross(x, chart = null) {
    this.cross = x;
    this.pointed = chart;
    for (const other of this.charts.values()) if (other.visible) other.drawCross();
  }

  draw() {
    const { metrics, ranks } = this.store;
    show(this.element, metrics.size > 0);
    show(this.bandButton, ranks.size > 1);
    if (!this.bandChosen && this.band !== ranks.size > FEW_LINES_IN_A_CHART) {
      this.band = ranks.size > FEW_LINES_IN_A_CHART;
      set(this.bandButton, "aria-pressed", this.band);
    }
    for (const name of metrics.keys()) if (!this.charts.has(name)) this.add(name);
    if (!this.numbers.hidden) this.drawNumbers();
    else {
      for (const chart of this.charts.values()) {
        if (chart.visible && chart.drawn) chart.drawValues();
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
    this.grid.append(chart.element);
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
    const head = row(...["metric", "rank", "newest", "least", "most", "last step", "values"].map((text, i) => cell("columnheader", text, i ? "anb-num" : "")));
    head.classList.add("anb-header");
    const all = [...this.store.metrics].flatMap(([name, series]) => [...series].map(([rank, curve]) => [name, rank, curve]));
    const body = all.map(([name, rank, curve]) =>
      row(
        cell("rowheader", name, ""), cell("cell", String(rank)), cell("cell", number(curve.last?.[1])),
        cell("cell", number(curve.least)), cell("cell", number(curve.most)), cell("cell", number(curve.last?.[0])), cell("cell", count(curve.pointCount)),
      ),
    );
    const table = h("div", { class: "anb-table anb-numbers-table", role: "table", "aria-label": "metrics" }, head, ...body);
    if (table.textContent !== this.numbers.textContent) this.numbers.replaceChildren(table);
  }
}
