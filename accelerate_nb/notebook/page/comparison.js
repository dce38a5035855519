// The curves of several runs over each other: the panel's charts, in which each line is a run.

import { Charts } from "./charts.js";
import { buildRoot, div, readTheme, span, watchTheme } from "./elements.js";
import { observeReport } from "./notebook.js";
import { feed, makeStore } from "./store.js";

/** Shows the metrics of a store whose ranks are runs; `lineNames` are their letters. */
class ComparisonView {
  constructor(store, lineNames) {
    this.store = store;
    this.lineNames = lineNames;
    this.palette = { key: "" };
    this.charts = new Charts(this);
    const legend = lineNames.map((name, run) => span(`anb-rank anb-r${run % 8}`, name));
    buildRoot(this, "Curves of the runs", div("anb-tools", ...legend), this.charts.element);
    watchTheme(() => readTheme(this));
  }

  draw() {
    if (!this.root.isConnected) return;
    if (!this.palette.key) readTheme(this);
    this.charts.draw();
    // what did not get its turn is painted in the next frame
    if (!this.charts.paint()) requestAnimationFrame(() => this.draw());
  }
}

export default () => ({
  initialize({ model }) {
    return observeReport(model.get("charts"), (pictures) => {
      const place = document.createElement("div");
      pictures.before(place);
      pictures.hidden = true;
      // one message has the `names` of the runs and their `metrics`
      const [store, message] = [makeStore(), model.get("message")];
      feed(store, message);
      const view = new ComparisonView(store, message.names);
      place.append(Object.assign(document.createElement("style"), { textContent: model.get("_css") }), view.root);
      view.draw();
    });
  },
});
