// The curves of several runs over each other: the panel's charts, in which each line is a run.

import { Charts } from "./charts.js";
import { buildRoot, div, h, readTheme, span, watchTheme } from "./elements.js";
import { observeReport } from "./notebook.js";
import { feed, makeStore } from "./store.js";

export default () => ({
  initialize({ model }) {
    return observeReport(model.get("charts"), (pictures) => {
      const place = h("div", {}, h("style", {}, model.get("_css")));
      pictures.before(place);
      pictures.hidden = true;
      // one message has the `names` of the runs, which are letters, and their `metrics`: runs stand for the ranks of a store
      const message = model.get("message");
      const view = { store: makeStore(), lineNames: message.names, palette: { key: "" } };
      feed(view.store, message);
      view.charts = new Charts(view);
      view.draw = () => {
        if (!view.root.isConnected) return;
        if (!view.palette.key) readTheme(view);
        view.charts.draw();
        // what did not get its turn is painted in the next frame
        if (!view.charts.paint()) requestAnimationFrame(view.draw);
      };
      const legend = message.names.map((name, run) => span(`anb-rank anb-r${run % 8}`, name));
      buildRoot(view, "Curves of the runs", div("anb-tools", ...legend), view.charts.element);
      watchTheme(() => readTheme(view));
      place.append(view.root);
      view.draw();
    });
  },
});
