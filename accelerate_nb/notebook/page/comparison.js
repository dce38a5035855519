// The curves of several runs over each other: the panel's charts, in which each line is a run.

import { Charts } from "./charts.js";
import { announcer, div, h, keepFromNotebook, readTheme, span, watchTheme } from "./elements.js";
import { observeReport } from "./notebook.js";
import { feed, makeStore } from "./store.js";

/** Shows the metrics of a store whose ranks are runs; `lineNames` are their letters. */
class ComparisonView {
  constructor(store, lineNames) {
    this.store = store;
    this.lineNames = lineNames;
    this.palette = { key: "" };
    const { element, announce } = announcer();
    this.announce = announce;
    this.charts = new Charts(this);
    const legend = lineNames.map((name, run) => span(`anb-rank anb-r${run % 8}`, name));
    this.root = h(
      "div",
      { class: "anb", role: "region", "aria-label": "Curves of the runs", "data-lm-suppress-shortcuts": "true" },
      div("anb-inner", div("anb-tools", ...legend), this.charts.element, element),
    );
    keepFromNotebook(this.root);
    watchTheme(() => this.readTheme());
  }

  readTheme() {
    if (!this.root.isConnected) return;
    this.palette = readTheme(this.root);
    this.charts.themed();
  }

  draw() {
    if (!this.root.isConnected) return;
    if (!this.palette.key) this.readTheme();
    this.charts.draw();
    // what did not get its turn is painted in the next frame
    if (!this.charts.paint()) requestAnimationFrame(() => this.draw());
  }
}

/** The charts in a place of the page, from one message with `names` of the runs and their `metrics`. */
export function openComparison(el, message, css) {
  const store = makeStore();
  feed(store, message);
  el.append(Object.assign(document.createElement("style"), { textContent: css }));
  const view = new ComparisonView(store, message.names);
  el.append(view.root);
  view.draw();
}

export default () => ({
  initialize({ model }) {
    return observeReport(model.get("charts"), (pictures) => {
      const place = document.createElement("div");
      pictures.before(place);
      pictures.hidden = true;
      openComparison(place, model.get("message"), model.get("_css"));
    });
  },
});
