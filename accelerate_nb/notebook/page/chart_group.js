// The charts of metrics whose names begin alike, under a heading that folds.

import { div, h, set, setStyle, show } from "./elements.js";

/** What stands before the first slash of a name, unless that is the one of a unit: "tokens/s". */
export const groupName = (name) => (name.includes("/") && !/^[^/]+\/(s|sec|second)$/.test(name) ? name.slice(0, name.indexOf("/")) : "");

/** The rest of the name, beneath that heading. */
export const nameInGroup = (name) => name.slice(groupName(name) ? groupName(name).length + 1 : 0);

export class ChartGroup {
  constructor(prefix, automatic) {
    this.prefix = prefix;
    this.automatic = automatic;
    this.charts = []; // in their order
    this.numbers = div("anb-numbers-row"); // metrics of one point
    this.grid = div("anb-charts");
    this.head = h("button", { type: "button", class: "anb-unfold anb-group-head", "aria-expanded": "true", onclick: () => this.toggle() }, h("span", { class: "anb-chevron", "aria-hidden": "true" }), prefix);
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

  toggle() {
    const open = this.head.getAttribute("aria-expanded") !== "true";
    set(this.head, "aria-expanded", open);
    for (const part of [this.numbers, this.grid]) show(part, open);
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
