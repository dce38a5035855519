// The charts of metrics whose names begin alike, under a heading that folds.

import { div, h, set, setStyle, show } from "./elements.js";

/** What stands before the first slash of a name. */
export const groupName = (name) => (name.includes("/") ? name.slice(0, name.indexOf("/")) : "");

export class ChartGroup {
  constructor(prefix, automatic) {
    this.prefix = prefix;
    this.automatic = automatic;
    this.grid = div("anb-charts");
    this.head = h("button", { type: "button", class: "anb-unfold anb-group-head", "aria-expanded": "true", onclick: () => this.toggle() }, h("span", { class: "anb-chevron", "aria-hidden": "true" }), prefix);
    show(this.head, prefix !== "");
    this.element = div("anb-chart-group", this.head, this.grid);
  }

  add(chart) {
    this.grid.append(chart.element);
    this.fit();
  }

  toggle() {
    const open = this.head.getAttribute("aria-expanded") !== "true";
    set(this.head, "aria-expanded", open);
    show(this.grid, open);
  }

  /** A group without a chart in sight takes no room. */
  fit() {
    const shown = [...this.grid.children].filter((chart) => !chart.hidden).length;
    show(this.element, shown > 0);
    // small groups share a row
    if (this.prefix) setStyle(this.element, "flex", `${shown} 1 ${shown * 230}px`);
  }
}
