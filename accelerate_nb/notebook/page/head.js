// The head of the panel, and the line of it that stays in sight while a person scrolls.

import { button, chip, div, h, keepFromNotebook, set, setStyle, setText, show, span } from "./elements.js";
import { clockOfDay, count, duration, timeLeft } from "./format.js";
import { runProgress, silence } from "./progress.js";
import { elapsed, END_STATES, kernelNow } from "./store.js";

const IDLE_AFTER = 30; // seconds without a message after which that is said

export class Head {
  constructor(view) {
    this.view = view;
    this.store = view.store;
    this.state = null;
    this.name = h("span", { class: "anb-name", role: "heading", "aria-level": "3" });
    this.chip = chip();
    this.time = h("span", { class: "anb-elapsed", title: "elapsed" });
    this.tags = span("anb-tags");
    this.facts = span("anb-facts");
    this.notes = span("anb-notes");
    this.buttons = div("anb-buttons"); // of the live parts
    this.element = div(
      "anb-head",
      div("anb-title", this.name, this.tags, this.chip.element, this.time, span("anb-space"), this.buttons),
      div("anb-sub", this.facts, this.notes),
    );
  }

  draw() {
    const { run, state, ranks, lineCount, lostAt, restarts } = this.store;
    const over = END_STATES.has(state.state);
    setText(this.name, run.name || "run");
    set(this.name, "title", run.name || "run");
    setText(this.tags, (run.tags ?? []).join(" · "));
    set(this.tags, "title", (run.tags ?? []).join(", "));
    this.chip.set(lostAt !== null ? "not connected" : this.view.stopPressed && !over ? "stopping" : state.state);
    const names = deviceNames(ranks);
    const devices = names.length > 1 ? `${names[0]} … ${names.at(-1)}` : names[0];
    set(this.facts, "title", [devices, `${count(lineCount)} ${lineCount === 1 ? "line" : "lines"}`, run.why].filter(Boolean).join("\n"));
    show(this.buttons, this.view.canAct && !over);
    if (this.state !== null && this.state !== state.state) this.view.announce(`${run.name}: ${state.state}${state.detail ? `, ${state.detail}` : ""}`);
    this.state = state.state;
    this.drawClock();
  }

  /** What moves on though nothing comes. */
  drawClock() {
    this.drawFacts();
    setText(this.time, duration(elapsed(this.store)));
    this.drawNotes();
  }

  /** 4 × CPU · bf16 · epoch 6/14 · 43 % · 16.5 it/s · ends 14:32 (in 24 s) */
  drawFacts() {
    const { run, ranks, restarts, precision, idleWarning } = this.store;
    const facts = [ranksOnDevices(ranks.size || run.size, ranks), ...(precision ? [precision] : [])];
    if (restarts.length) facts.push(`restart ${restarts.at(-1)[0]} of ${restarts.at(-1)[1]}`);
    if (!END_STATES.has(this.store.state.state)) {
      const { texts, left } = runProgress(this.store);
      const silent = silence(this.store);
      facts.push(...texts, ...(silent ? [`no step for ${timeLeft(silent)}`] : []));
      // the rates of a run that stands still are those of before
      if (left !== null && !idleWarning) facts.push(`ends ${clockOfDay(kernelNow(this.store) + left)} (in ${timeLeft(left)})`);
    }
    setText(this.facts, facts.join(" · "));
  }

  drawNotes() {
    const { state, gaps, skipped, following, lostAt } = this.store;
    const over = END_STATES.has(state.state);
    const notes = [];
    if (state.detail && state.state !== "running") notes.push(state.detail);
    if (skipped) notes.push(`${count(skipped)} lines are only in the files`);
    if (gaps) notes.push(`${count(gaps)} ${gaps === 1 ? "message" : "messages"} from the kernel did not arrive`);
    const idle = (performance.now() - this.store.lastMessageAt) / 1000;
    if (this.view.canAct && !over && following && idle > IDLE_AFTER) notes.push(`nothing from the kernel for ${duration(idle)}`);
    if (lostAt !== null) notes.push("the kernel can't be reached: this view is frozen until it is back");
    if (!following) notes.push("frozen: press Unfreeze view to follow");
    setText(this.notes, notes.join(" · "));
  }
}

/** "4 × GPU", or "4 ranks" while it is not known what they compute on. */
function ranksOnDevices(size, ranks) {
  const kinds = [...new Set(deviceNames(ranks).map((name) => name.split(":")[0]))];
  if (!kinds.length) return `${size} ${size === 1 ? "rank" : "ranks"}`;
  return `${size} × ${kinds.map((kind) => (kind === "cuda" ? "GPU" : kind.toUpperCase())).join("/")}`;
}

const deviceNames = (ranks) => [...new Set([...ranks.values()].flatMap((rankState) => [...rankState.devices.keys()]))];

const BETWEEN = 1000; // ms between two drawings: the panel itself is not drawn while it is out of sight

/** The bar, at the top of what scrolls; a run in the background has it, others by the button in the panel's head. */
export class RunBar {
  constructor(view) {
    this.view = view;
    this.element = null;
    // `pinned` is whether a person wants it, `shown` the line that stands there: another view goes on with it when the run ends
    this.shared = view.store.bar ??= { pinned: null, shown: null };
    this.isAway = null; // whether the panel's head is out of sight, once that is known
    this.offset = 0; // of the panel in what scrolls
    this.pin = button("anb-plain-btn", "Pin", () => this.choose(!this.isPinned), { title: "Keep a line of this run in sight while you scroll" });
    view.head.buttons.prepend(this.pin);
    this.chip = chip();
    [this.name, this.facts] = [span("anb-run-name"), span("anb-run-facts")];
    this.stop = button("anb-stop", "Stop", () => this.pressStop());
    this.fill = div("anb-fill");
    this.bar = h(
      "div",
      { class: "anb-run-bar", role: "region", "data-lm-suppress-shortcuts": "true" },
      h("button", { type: "button", class: "anb-run-line", title: "Show the panel", onclick: () => this.reveal() }, this.chip.element, this.name, this.facts),
      this.stop,
      button("anb-plain-btn", "×", () => (this.over.length ? this.over : [this.bar]).forEach((bar) => bar.anbRun.choose(false)), { "aria-label": "Close this line", title: "Close this line" }),
      this.fill,
    );
    this.bar.anbRun = this;
    // the notebook acts on keys, and on presses in its margin
    keepFromNotebook(this.bar, "mousedown");
    this.sight = new IntersectionObserver((entries) => {
      this.isAway = !entries.at(-1).isIntersecting;
      this.update();
    });
    this.sight.observe(view.head.element);
    this.timer = setInterval(() => document.hidden || this.update(), BETWEEN);
  }

  get isPinned() {
    return this.shared.pinned ?? this.view.store.run.background;
  }

  choose(pinned) {
    this.shared.pinned = pinned;
    this.update();
  }

  pressStop() {
    this.view.controls.pressStop();
    this.update();
  }

  /** Whether the panel has a place in the page: the notebook takes cells that are far away out of it, or hides them. */
  get hasPlace() {
    return this.view.root.getClientRects().length > 0;
  }

  takeAway() {
    const bars = this.bar.parentElement;
    this.bar.remove();
    if (bars && !bars.hasChildNodes()) bars.remove();
    if (this.shared.shown === this) this.shared.shown = null;
  }

  draw() {
    show(this.pin, Boolean(this.scroller));
    set(this.pin, "aria-pressed", this.isPinned);
  }

  update() {
    const { head, controls, store, canAct, root } = this.view;
    if (this.hasPlace) {
      // what scrolls, and where in it the panel is
      const notebook = root.closest(".jp-Notebook");
      this.scroller = notebook?.querySelector(":scope > .jp-WindowedPanel-outer") ?? notebook;
      if (this.scroller) this.offset = this.scroller.scrollTop + root.getBoundingClientRect().top - this.scroller.getBoundingClientRect().top;
    }
    this.draw();
    // when the run ends another view takes over
    const isLast = [...store.views].at(-1) === this.view;
    const isOver = END_STATES.has(store.state.state);
    if (this.isAway === null || !this.scroller || (isOver && !isLast)) return;
    // one line is enough; a run that ends in sight needs none, one that ends out of sight has it until it was seen
    const { shown } = this.shared;
    const isNeeded = isOver ? shown : !shown || shown === this;
    if (!this.isPinned || !this.isAway || !isNeeded) {
      this.takeAway();
      return;
    }
    if (this.shared.shown !== this) this.shared.shown?.takeAway();
    this.shared.shown = this;
    if (!this.bar.isConnected) {
      let bars = this.scroller.querySelector(":scope > .anb-bars");
      if (!bars) this.scroller.prepend((bars = div("anb-bars")));
      bars.append(this.bar);
    }
    for (const part of [head, controls]) part.draw();
    set(this.bar, "aria-label", `Run ${store.run.name}, in sight`);
    set(this.bar, "data-anb-theme", root.dataset.anbTheme);
    this.chip.set(head.chip.element.dataset.state);
    setText(this.name, head.name.textContent);
    setText(this.facts, `${head.time.textContent} · ${head.facts.textContent}`);
    setText(this.stop, controls.stop.textContent);
    this.stop.disabled = controls.stop.disabled;
    show(this.stop, canAct && !controls.stop.hidden);
    setStyle(this.fill, "transform", `scaleX(${runProgress(store).share ?? 0})`);
    this.bar.classList.toggle("anb-over", isOver);
    const { over } = this;
    show(this.bar, !isOver || over[0] === this.bar);
    if (over[0] === this.bar && over.length > 1) setText(this.facts, `${this.facts.textContent} · and ${over.slice(1).map(({ anbRun: { name, chip } }) => `${name.textContent} ${chip.element.dataset.state}`).join(", ")}`);
  }

  /** The lines of runs that are over: one stands for all of them. */
  get over() {
    return [...(this.bar.parentElement?.querySelectorAll(":scope > .anb-over") ?? [])];
  }

  /** Scrolls to the panel, with the keyboard's focus. */
  reveal() {
    const { root } = this.view;
    if (!this.hasPlace) this.scroller.scrollTop = this.offset;
    setTimeout(() => {
      root.scrollIntoView({ block: "start" });
      this.pin.focus({ preventScroll: true });
    }, 50); // until the notebook has put the cell into the page
  }

  close() {
    clearInterval(this.timer);
    this.sight.disconnect();
    this.takeAway();
  }
}
