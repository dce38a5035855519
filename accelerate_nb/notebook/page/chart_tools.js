// What can be done with all charts at once: which are shown, over what, how smooth, as what else.

import { button, div, h, set, setText, show } from "./elements.js";
import { copyButton, saveFile } from "./text_export.js";

const MANY_CHARTS = 3; // from here on a filter helps

export class ChartTools {
  constructor(charts) {
    this.charts = charts;
    this.filter = h("input", { type: "search", class: "anb-search anb-filter", placeholder: "filter charts", "aria-label": "filter charts", oninput: () => charts.filter(this.filter.value) });
    this.smoothing = h("input", { type: "range", class: "anb-range", min: 0, max: 0.99, step: 0.01, value: 0, "aria-label": "smoothing", title: "smoothing: the weight of earlier values in a moving average", oninput: () => charts.setSmoothing(Number(this.smoothing.value)) });
    this.axis = h("select", { class: "anb-select", "aria-label": "axis of the charts", title: "what the charts are drawn over", onchange: () => charts.setAxis(this.axis.value) });
    this.all = button("anb-plain-btn", "Show all", () => charts.setZoom(null), { title: "end the zoom; a double click on a chart does the same" });
    this.band = button("anb-plain-btn", "Band", () => charts.toggleBand(), { "aria-pressed": "false", title: "mean and range of all ranks, instead of a line for each" });
    this.table = button("anb-plain-btn", "Table", () => charts.toggleTable(), { "aria-pressed": "false", title: "the numbers as a table" });
    this.csv = button("anb-plain-btn", "CSV", () => saveFile(charts.csv()), { title: "save the values that the page has" });
    this.frame = copyButton("Copy as DataFrame", () => charts.dataFrame(), (text) => charts.announce(text));
    set(this.frame, "title", "copy a line of code that reads all values with pandas");
    this.element = div("anb-tools", this.filter, h("label", { class: "anb-smoothing" }, "smooth", this.smoothing), this.axis, this.all, this.band, this.table, this.csv, this.frame);
  }

  draw() {
    const { charts } = this;
    const { axes } = charts;
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
