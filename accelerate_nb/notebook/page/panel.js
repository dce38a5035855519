// The panel of a run, hung into a page by anywidget, with a kernel behind it: a view of what the store knows, painted at most five times a second.
//
// The store belongs to the widget's model, so that every view of it shows the same; a view belongs to one place in the page: that
// of the widget while the run goes on, then that of the run's report, wherever the page shows it.

import { Charts } from "./charts.js";
import { buildRoot, div, escaped, h, readTheme, saveFile, set, watchTheme } from "./elements.js";
import { count, duration, failureText, number, plain } from "./format.js";
import { Head, noticesOf, RunBar, stacksOf } from "./head.js";
import { endWithKernel, leaveNote, observeReport, redrawLostPanel, replacePanel, restorePanel, saveNotebook, takeNote, watchKernel, watchSaves } from "./notebook.js";
import { Output } from "./output.js";
import { nodeState, Ranks, ranksName, ranksOfNodes } from "./ranks.js";
import { bell, knobsOf, notifyOfEnd, profilesOf, profileText, profiling, RunControls } from "./run_controls.js";
import { acknowledge, elapsed, END_STATES, feed, kernelIsReachable, kernelNow, makeStore, progressOf, progressText, silence, SYMBOLS } from "./store.js";

const PAINT = 200; // ms between two paintings
const TICKS_OF_TAB = 5; // between two writings of the tab's title
const FEW_RANKS = 16; // up to here each rank has a full row and a tab

/** Shows what a store knows, in a place of the page. */
export class View {
  constructor(store, place, send) {
    Object.assign(this, { store, send, id: Math.random().toString(36).slice(2, 10), palette: { key: "" } });
    Object.assign(this, { restUntil: 0, epoch: store.epoch, changes: -1, ticks: 0, visible: true });
    this.stopPressed = 0; // when
    this.head = new Head(this);
    this.notices = noticesOf(this);
    this.ranks = new Ranks(this);
    this.charts = new Charts(this);
    this.profile = profilesOf(this);
    this.output = new Output(this);
    this.extras = [stacksOf(this), new RunControls(this), knobsOf(this), profiling(this), bell(this), new RunBar(this)];
    const top = div("anb-top", this.ranks.element, this.charts.element);
    const extras = this.extras.flatMap(({ element }) => element ?? []);
    buildRoot(this, "Distributed run", this.head.element, this.notices.element, ...extras, top, this.profile.element, this.output.element);
    this.root.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      document.activeElement?.blur?.();
      this.root.closest(".jp-Notebook")?.focus(); // which has the keyboard again
    });
    this.sight = new IntersectionObserver((entries) => {
      this.visible = entries.at(-1).isIntersecting;
      if (this.visible) this.draw();
    });
    this.sight.observe(this.root);
    this.unwatchTheme = watchTheme(() => readTheme(this));
    this.timer = setInterval(() => this.tick(), PAINT);
    store.views.add(this);
    place.append(this.root);
    this.draw();
  }

  close() {
    clearInterval(this.timer);
    this.unwatchTheme();
    this.sight.disconnect();
    for (const part of this.extras) part.close?.();
    this.charts.forget();
    this.store.views.delete(this);
    this.root.remove();
  }

  tick() {
    acknowledge(this.store, this.send);
    if (++this.ticks % TICKS_OF_TAB === 0) for (const part of this.extras) part.drawTab?.();
    if (document.hidden || !this.root.isConnected || !this.visible || !this.store.following) return;
    // a run that falls silent, of which nothing comes
    if (silence(this.store) > 0 !== this.ranks.silent) this.changes = -1;
    if (this.store.changes === this.changes) {
      // what moves on though nothing comes
      for (const part of [this.head, this.controls]) part.draw();
      return;
    }
    const from = performance.now();
    if (from < this.restUntil) return;
    this.draw();
    // where painting is slow (a busy machine, hundreds of ranks) it is done less often
    this.restUntil = performance.now() + 2 * (performance.now() - from);
  }

  draw() {
    if (!this.root.isConnected) return;
    if (!this.palette.key) readTheme(this);
    this.changes = this.store.changes;
    if (this.epoch !== this.store.epoch) {
      this.epoch = this.store.epoch;
      this.stopPressed = 0;
      for (const part of [this.ranks, this.charts, this.output]) part.forget();
    }
    // canvases first: text on them asks for the page's style, which is reckoned anew after each change of the page
    if (!this.charts.paint()) this.changes = -1; // the others at the next tick
    set(this.root, "aria-label", `Distributed run ${this.store.run.name}`);
    for (const part of [this.head, this.notices, ...this.extras, this.ranks, this.charts, this.profile, this.output]) part.draw();
  }

  get many() {
    return this.store.ranks.size > FEW_RANKS;
  }

  get canAct() {
    return this.store.run.can_act && kernelIsReachable(this.store);
  }
}

const SAVE_DELAY = 500; // ms: what ended the kernel is told in two messages
const RECENT = 15; // seconds
const CLOSE_DELAY = 5000; // ms in which the report takes a view's place

// A function, called once for a model: `initialize` and `render` are given different objects for the model, and share this.
export default () => {
  const store = makeStore();
  const isOver = () => END_STATES.has(store.state.state) || store.gone !== "";
  const closingViews = new Set(); // views whose place in the page has gone, of a run that is over
  const sender = (model) => (message) => {
    if (!kernelIsReachable(store)) return;
    try {
      model.send(message);
    } catch {
      // a page that was not told yet that its kernel has ended
    }
  };

  function initialize({ model }) {
    const notebook = model.widget_manager?.context;
    const send = sender(model);
    const { panel, report } = model.get("place") ?? {}; // the kernel takes the panel's id back once a page has the end
    const waiting = []; // reports whose panel the kernel has not sent yet
    const unobserve = observeReport(report, (found) => {
      if (isOver()) return openInReport(model, found);
      waiting.push(found);
      return send({ do: "hello", seq: 0 });
    });
    const onMessage = (message, buffers) => {
      if (message.file) saveFile(message.file.name, buffers[0]);
      if (message.report) replacePanel(message.report, notebook);
      const [hadEnded, wasKnown] = [isOver(), store.epoch > 0];
      feed(store, message);
      const ends = isOver() && !hadEnded;
      // a kernel that is shut down in good order tells of the run's end after the page was told of the kernel's
      const isLastWord = END_STATES.has(message.state?.state) && store.gone !== "";
      if (isLastWord) store.gone = "";
      // what ended before this page was loaded is no news
      if (ends && wasKnown) notifyOfEnd(store);
      if ((ends || isLastWord) && panel) takeNote(panel, notebook);
      if (isOver()) for (const found of waiting.splice(0)) openInReport(model, found);
      // also where the page's timers sleep, in a tab in the background
      if (store.views.size) acknowledge(store, send);
    };
    const ended = (how) => {
      const { gone, state: { ended: before } } = store;
      if (endWithKernel(store, how)) {
        notifyOfEnd(store);
        // the widget ends with its kernel; its panel stays in this page, in the place of the report
        observeReport(report, (found) => openInReport(model, found));
        // no view of a widget can be drawn again: the notebook is left with what is known of the run
        const leaveReport = () => {
          const { panel: shown } = model.get("place") ?? {};
          if (!store.gone || (shown && replacePanel({ of: shown, data: savedReport(store, report), metadata: {} }, notebook))) saveNotebook(notebook);
        };
        setTimeout(leaveReport, SAVE_DELAY);
      }
      // a kernel that is shut down in good order has ended the run, and left its report; one that was gone before has no other
      else if (!gone && before !== null && kernelNow(store) - before < RECENT) saveNotebook(notebook);
      else return;
      // the cell's last outputs may come after the word that its kernel has ended
      setTimeout(() => notebook.model?.dirty && saveNotebook(notebook), CLOSE_DELAY);
    };
    const connected = (isThere) => {
      if (isThere === (store.lostAt === null) || END_STATES.has(store.state.state)) return;
      // without the kernel the clock stands
      store.lostAt = isThere ? null : kernelNow(store);
      store.changes++;
      if (isThere) send({ do: "hello", seq: 0 });
    };
    const unwatch = watchKernel(notebook?.sessionContext, { ended, connected });
    restorePanel(model.get("place"), notebook);
    const unwatchLost = redrawLostPanel(model.get("place"), notebook, store.views);
    const unwatchSaves = watchSaves(notebook, () => {
      const { name, folder } = store.run;
      if (folder && !isOver()) leaveNote(model.get("place")?.panel, notebook, `${name} was running when this notebook was saved. Where its panel can't be shown, accelerate_nb.attach(${JSON.stringify(folder)}) brings it back, with its end.`);
    });
    model.on("msg:custom", onMessage);
    return () => {
      for (const end of [unobserve, unwatch, unwatchLost, unwatchSaves]) end();
      model.off("msg:custom", onMessage);
    };
  }

  /** Puts the panel into the place of a report. The view that showed the run live goes on there: what is chosen and searched in it stays. */
  function openInReport(model, report) {
    const place = h("div", {}, h("style", {}, model.get("_css")));
    report.before(place);
    report.hidden = true;
    // the notebook may take the view out of the page before its cleanup is called, or after
    const view = [...closingViews, ...store.views].find(({ root }) => !root.isConnected);
    if (!view) return void new View(store, place, sender(model));
    closingViews.delete(view);
    view.hasMoved = true;
    place.append(view.root);
    view.output.arrange();
    view.draw();
  }

  function render({ model, el }) {
    const send = sender(model);
    const view = new View(store, el, send);
    // a page that is loaded anew may get changes before it draws: it knows the run once it was given all of it
    send({ do: "hello", view: view.id, seq: store.epoch ? store.seq : 0 });
    return () => {
      if (view.root.isConnected && view.hasMoved) return; // it goes on in the report
      if (!isOver()) return void view.close();
      closingViews.add(view);
      setTimeout(() => closingViews.delete(view) && view.close(), CLOSE_DELAY);
    };
  }

  return { initialize, render };
};

const MOST_LINES_SAVED = 100; // of each rank

/** What a notebook keeps of it: the text of all that a store knows but its curves, which are in the run's folder. */
export function savedReport(store, id) {
  const { run, state, gone, failure, causes } = store;
  const ranks = [...store.ranks.values()];
  const rankText = (rankState) => {
    const { bar } = progressOf(rankState);
    const values = [...rankState.newest].map(([name, value]) => `${name} ${number(value)}`);
    return [`rank ${rankState.rank}`, rankState.state, bar ? `${bar.label} ${progressText(bar, false)}` : "", ...values].filter(Boolean).join("  ");
  };
  const lastLines = ({ rank, ring, lineCount }) => {
    const length = Math.min(MOST_LINES_SAVED, ring.length);
    const lines = Array.from({ length }, (_, i) => `  ${plain(ring.at(ring.length - length + i).text).slice(0, 500)}`);
    return length ? [`rank ${rank}: the last ${length} of ${count(lineCount)} lines`, ...lines].join("\n") : "";
  };
  const head = `${run.name}  ${SYMBOLS[state.state] ?? ""} ${state.state}  ${duration(elapsed(store))}, ${count(store.lineCount)} lines`;
  const error = failure ? [failureText(failure), plain(failure.traceback ?? "")] : [];
  const rows = ranksOfNodes(store).flatMap(([node, ofNode]) => [...(node ? [`${node.label}  ${ranksName(node)}  ${nodeState(ofNode)}`] : []), ...ofNode.map(rankText)]);
  const folder = run.folder && `All output: ${run.folder}\naccelerate_nb.attach(${JSON.stringify(run.folder)}) shows it again, with its curves.`;
  const text = [[head, run.why].join("\n"), gone, ...error, rows.join("\n"), causes.join("\n"), profileText(ranks), ...ranks.map(lastLines), folder].filter(Boolean).join("\n\n");
  return { "text/plain": text, "text/html": `<pre id="${id}">${escaped(text)}</pre>\n` };
}

