// The panel of a run, hung into a page by anywidget, with a kernel behind it.
//
// The store belongs to the widget's model, so that every view of it shows the same; a view belongs to one place in the page: that
// of the widget while the run goes on, then that of the run's report, wherever the page shows it.

import { saveFile } from "./text_export.js";
import { observeReport } from "./report_observer.js";
import { savedReport } from "./saved_report.js";
import { Knobs } from "./knobs.js";
import { Profiling } from "./profiling.js";
import { endWithKernel, takeConnection, watchKernel } from "./kernel_status.js";
import { leaveNote, replacePanel, restorePanel, saveNotebook, takeNote } from "./notebook_outputs.js";
import { Bell, notifyOfEnd } from "./notifications.js";
import { acknowledge, feed, kernelIsReachable, kernelNow, makeStore } from "./store.js";
import { END_STATES } from "./states.js";
import { openView } from "./view.js";
import { RunBar } from "./run_bar.js";
import { RunControls } from "./run_controls.js";
import { Stacks } from "./stacks.js";

const LIVE_PARTS = [Stacks, RunControls, Knobs, Profiling, Bell, RunBar];
const SAVE_DELAY = 500; // ms: what ended the kernel is told in two messages
const RECENT = 15; // seconds
const CLOSE_DELAY = 5000; // ms in which the report takes a view's place

/** Leaves in the notebook what is known of a run whose kernel has ended, and saves it: no view of a widget can be drawn again. */
async function saveReport(model, store, notebook) {
  const { panel } = model.get("place") ?? {};
  if (!panel) return;
  if (replacePanel({ of: panel, data: savedReport(store), metadata: {} }, notebook)) await saveNotebook(notebook);
}

// A function, called once for a model: `initialize` and `render` are given different objects for the model, and share this.
export default () => {
  const store = makeStore();
  const closingViews = new Set(); // views whose place in the page has gone, of a run that is over
  const sender = (model) => (message) => kernelIsReachable(store) && model.send(message);

  function initialize({ model }) {
    const notebook = model.widget_manager?.context;
    const send = sender(model);
    const { panel, report } = model.get("place") ?? {}; // the kernel takes the panel's id back once a page has the end
    const waiting = []; // reports whose panel the kernel has not sent yet
    const isOver = () => END_STATES.has(store.state.state);
    const unobserve = observeReport(report, (found) => {
      if (isOver()) return openInReport(model, found);
      waiting.push(found);
      return send({ do: "hello", seq: 0 });
    });
    const onMessage = (message, buffers) => {
      if (message.file) saveFile(message.file, buffers);
      if (message.report) replacePanel(message.report, notebook);
      const [hadEnded, wasKnown] = [isOver(), store.epoch > 0];
      feed(store, message);
      const ends = isOver() && !hadEnded;
      // what ended before this page was loaded is no news
      if (ends && wasKnown) notifyOfEnd(store);
      if (ends && panel) takeNote(panel, notebook);
      if (isOver()) for (const found of waiting.splice(0)) openInReport(model, found);
      // also where the page's timers sleep, in a tab in the background
      if (store.views.size) acknowledge(store, send);
    };
    const ended = (how) => {
      const { gone, state: { ended: before } } = store;
      if (endWithKernel(store, how)) {
        notifyOfEnd(store);
        setTimeout(() => saveReport(model, store, notebook), SAVE_DELAY);
      }
      // a kernel that is shut down in good order has ended the run, and left its report; one that was gone before has no other
      else if (!gone && before !== null && kernelNow(store) - before < RECENT) saveNotebook(notebook);
      else return;
      // the cell's last outputs may come after the word that its kernel has ended
      setTimeout(() => notebook.model?.dirty && saveNotebook(notebook), CLOSE_DELAY);
    };
    const connected = (isThere) => {
      if (takeConnection(store, isThere) && isThere) send({ do: "hello", seq: 0 });
    };
    const unwatch = watchKernel(notebook?.sessionContext, { ended, connected });
    restorePanel(model.get("place"), notebook);
    const onSave = (_, state) => {
      const { name, folder } = store.run;
      if (state === "started" && folder && !isOver()) leaveNote(model.get("place")?.panel, notebook, `${name} was running when this notebook was saved. Where its panel can't be shown, accelerate_nb.attach(${JSON.stringify(folder)}) brings it back, with its end.`);
    };
    notebook?.saveState?.connect(onSave);
    model.on("msg:custom", onMessage);
    return () => {
      unobserve();
      unwatch();
      notebook?.saveState?.disconnect(onSave);
      model.off("msg:custom", onMessage);
    };
  }

  /** Puts the panel into the place of a report. The view that showed the run live goes on there: what is chosen and searched in it stays. */
  function openInReport(model, report) {
    const place = document.createElement("div");
    report.before(place);
    report.hidden = true;
    place.append(Object.assign(document.createElement("style"), { textContent: model.get("_css") }));
    // the notebook may take the view out of the page before its cleanup is called, or after
    const view = [...closingViews, ...store.views].find(({ root }) => !root.isConnected);
    closingViews.delete(view);
    if (view) view.moveTo(place);
    else openView(store, place, sender(model), LIVE_PARTS);
  }

  function close(view) {
    if (view.root.isConnected && view.hasMoved) return; // it goes on in the report
    if (!END_STATES.has(store.state.state)) return view.close();
    closingViews.add(view);
    return setTimeout(() => closingViews.delete(view) && view.close(), CLOSE_DELAY);
  }

  function render({ model, el }) {
    const send = sender(model);
    const view = openView(store, el, send, LIVE_PARTS);
    // a page that is loaded anew may get changes before it draws: it knows the run once it was given all of it
    send({ do: "hello", view: view.id, seq: store.epoch ? store.seq : 0 });
    return () => {
      close(view);
    };
  }

  return { initialize, render };
};
