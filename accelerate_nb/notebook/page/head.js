// The head of the panel, the line of it that stays in sight while a person scrolls, and what a person should notice.

import { button, chip, copyButton, div, folded, h, keepFromNotebook, set, setStyle, setText, show, span } from "./elements.js";
import { clockOfDay, count, duration, plain, runsOf, timeLeft } from "./format.js";
import { elapsed, END_STATES, kernelNow, runProgress, silence } from "./store.js";

const IDLE_AFTER = 30; // seconds without a message after which that is said

export class Head {
  constructor(view) {
    Object.assign(this, { view, store: view.store, state: null });
    this.name = h("span", { class: "anb-name", role: "heading", "aria-level": "3" });
    this.chip = chip();
    this.time = h("span", { class: "anb-elapsed", title: "elapsed" });
    [this.tags, this.facts, this.notes] = [span("anb-tags"), span("anb-facts"), span("anb-notes")];
    this.buttons = div("anb-buttons"); // of the live parts
    this.element = div(
      "anb-head",
      div("anb-title", this.name, this.tags, this.chip.element, this.time, span("anb-space"), this.buttons),
      div("anb-sub", this.facts, this.notes),
    );
  }

  draw() {
    const { run, state, ranks, lineCount, restarts, precision, idleWarning, gaps, skipped, following, lostAt } = this.store;
    const over = END_STATES.has(state.state);
    setText(this.name, run.name || "run");
    set(this.name, "title", run.name || "run");
    setText(this.tags, (run.tags ?? []).join(" · "));
    set(this.tags, "title", (run.tags ?? []).join(", "));
    this.chip.set(lostAt !== null ? "not connected" : this.view.stopPressed && !over ? "stopping" : state.state);
    const names = [...new Set([...ranks.values()].flatMap(({ devices }) => [...devices.keys()]))];
    const devices = names.length > 1 ? `${names[0]} … ${names.at(-1)}` : names[0];
    set(this.facts, "title", [devices, `${count(lineCount)} ${lineCount === 1 ? "line" : "lines"}`, run.why].filter(Boolean).join("\n"));
    show(this.buttons, this.view.canAct && !over);
    if (this.state !== null && this.state !== state.state) this.view.announce(`${run.name}: ${state.state}${state.detail ? `, ${state.detail}` : ""}`);
    this.state = state.state;
    setText(this.time, duration(elapsed(this.store)));
    const size = ranks.size || run.size;
    const kinds = [...new Set(names.map((name) => name.split(":")[0]))].map((kind) => (kind === "cuda" ? "GPU" : kind.toUpperCase()));
    // 4 × CPU · bf16 · epoch 6/14 · 43 % · 16.5 it/s · ends 14:32 (in 24 s)
    const facts = [kinds.length ? `${size} × ${kinds.join("/")}` : `${size} ${size === 1 ? "rank" : "ranks"}`];
    if (precision) facts.push(precision);
    if (restarts.length) facts.push(`restart ${restarts.at(-1)[0]} of ${restarts.at(-1)[1]}`);
    if (!over) {
      const { texts, left } = runProgress(this.store);
      const silent = silence(this.store);
      facts.push(...texts, ...(silent ? [`no step for ${timeLeft(silent)}`] : []));
      // the rates of a run that stands still are those of before
      if (left !== null && !idleWarning) facts.push(`ends ${clockOfDay(kernelNow(this.store) + left)} (in ${timeLeft(left)})`);
    }
    setText(this.facts, facts.join(" · "));
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

/** The bar, at the top of what scrolls; a run in the background has it, others by the button in the panel's head. */
export class RunBar {
  constructor(view) {
    this.view = view;
    // `pinned` is whether a person wants it, `shown` the line that stands there: another view goes on with it when the run ends
    this.shared = view.store.bar ??= { pinned: null, shown: null };
    this.isAway = null; // whether the panel's head is out of sight, once that is known
    this.offset = 0; // of the panel in what scrolls
    this.pin = button("anb-plain-btn", "Pin", () => this.choose(!this.isPinned), { title: "Keep a line of this run in sight while you scroll" });
    view.head.buttons.prepend(this.pin);
    this.chip = chip();
    [this.name, this.facts] = [span("anb-run-name"), span("anb-run-facts")];
    this.stop = button("anb-stop", "Stop", () => {
      view.controls.pressStop();
      this.drawTab();
    });
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
      this.drawTab();
    });
    this.sight.observe(view.head.element);
  }

  get isPinned() {
    return this.shared.pinned ?? this.view.store.run.background;
  }

  choose(pinned) {
    this.shared.pinned = pinned;
    this.drawTab();
  }

  /** Whether the panel has a place in the page: the notebook takes cells that are far away out of it, or hides them. */
  get hasPlace() {
    return this.view.root.getClientRects().length > 0;
  }

  close() {
    const bars = this.bar.parentElement;
    this.bar.remove();
    if (bars && !bars.hasChildNodes()) bars.remove();
    if (this.shared.shown === this) this.shared.shown = null;
  }

  draw() {
    show(this.pin, Boolean(this.scroller));
    set(this.pin, "aria-pressed", this.isPinned);
  }

  /** Draws the line, also while the panel itself is out of sight, and not drawn. */
  drawTab() {
    const { head, controls, store, canAct, root } = this.view;
    // a panel that is taken away goes out of sight, too
    if (document.hidden || !store.views.has(this.view)) return;
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
    if (!this.isPinned || !this.isAway || !isNeeded) return void this.close();
    if (this.shared.shown !== this) this.shared.shown?.close();
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
}

/** Restarts, a stop, and the error that leads. */
export function noticesOf(view) {
  const { store } = view;
  const shown = { failure: null, attempt: 0 };
  const restarts = h("div", { class: "anb-restarts", role: "note", "aria-label": "Restarts", hidden: true });
  const stop = h("div", { class: "anb-stopped", role: "note", hidden: true });
  const error = h("div", { class: "anb-failure-place", hidden: true });
  const draw = () => {
    const { failure, gone, state } = store;
    const [attempt, , text] = store.restarts.at(-1) ?? [0];
    show(restarts, attempt > 0);
    if (attempt !== shown.attempt) {
      restarts.replaceChildren(...store.restarts.map(([, , sentence]) => div("anb-restart", sentence)));
      if (attempt) view.announce(text);
    }
    // that ranks end with an interrupt is what a stop does: no error
    const stopped = Boolean(gone) || (state.state === "stopped" && !failure);
    show(stop, stopped);
    if (stopped) setText(stop, `${state.state === "running" ? "▶" : "■"} ${gone || "Stopped by you. The ranks' output until then is below."}`);
    if (failure !== shown.failure) {
      show(error, Boolean(failure));
      error.replaceChildren(...(failure ? [failureView(failure, view)] : []));
      if (failure) view.announce(`${failure.rank === null ? "The run" : `Rank ${failure.rank}`} failed: ${failure.type}: ${failure.message}`);
    }
    Object.assign(shown, { failure, attempt });
  };
  return { element: div("anb-notices", restarts, stop, error), draw };
}

/** The error that leads: its sentence, the person's own lines, what to do, and what the others said. */
function failureView(failure, view) {
  const traceback = h("pre", { class: "anb-pre", tabindex: "0", role: "group", "aria-label": "traceback" }, plain(failure.traceback || ""));
  const ofRun = failure.rank === null; // its time was over, and no rank's fault
  const others = failure.others ?? [];
  const lines = failure.last_lines ?? [];
  return h(
    "div",
    { class: "anb-failure", role: "region", "aria-label": "The error" },
    div(
      "anb-failure-head",
      ofRun ? null : span(`anb-rank anb-r${failure.rank % 8}`, `rank ${failure.rank}`),
      span("anb-failure-type", failure.type),
      span("anb-failure-message", failure.message),
    ),
    failure.advice ? div("anb-advice", h("span", { class: "anb-advice-mark", "aria-hidden": "true" }, "→"), span("", failure.advice)) : null,
    ...frameRuns(failure.frames ?? []),
    lines.length ? div("anb-last", div("anb-caption", "Its last lines"), h("pre", { class: "anb-pre", tabindex: "0", role: "group", "aria-label": "last lines" }, lines.map(plain).join("\n"))) : null,
    others.length ? div("anb-others", div("anb-caption", "The other ranks"), ...others.map((text) => div("anb-other", text))) : null,
    failure.traceback ? folded(ofRun ? "Every rank's stack" : "Whole traceback", traceback, copyButton("Copy", () => plain(failure.traceback), view)) : null,
  );
}

/** Own frames stand open; frames of others that follow each other are folded into one line. */
function frameRuns(frames) {
  const guilty = frames.findLast(([, , , own]) => own);
  const view = (frame) => {
    const [place, name, source, own] = frame;
    return div(
      `anb-frame${own ? " anb-own" : ""}${frame === guilty ? " anb-guilty" : ""}`,
      div("anb-frame-place", span("anb-place", place), name ? span("anb-in", ` in ${name}`) : null),
      source ? h("code", { class: "anb-source" }, source) : null,
    );
  };
  const runs = runsOf(frames, ([, , , own], i) => (own ? i : "others"));
  return runs.map((run) => (run[0][3] ? view(run[0]) : folded(`${run.length} ${run.length === 1 ? "call" : "calls"} in other code`, ...run.map(view))));
}

/** The warning of ranks that stand still, and the stacks that were requested. */
export function stacksOf(view) {
  const { store } = view;
  let shown = store.stacks;
  let opener = null; // what had the keyboard when they were requested
  view.requestStacks = () => {
    store.stacksRequested = true;
    opener = document.activeElement;
    view.send({ do: "stacks" });
    view.announce("Requested the stacks of all ranks");
    view.draw();
  };
  // the keyboard goes back to where they were asked from
  const putAway = (event) => {
    event.stopPropagation();
    show(stacks, false);
    (opener?.isConnected ? opener : view.controls.stacks).focus();
  };
  const warning = span("anb-idle-text");
  const request = button("", "Stacks", () => view.requestStacks());
  const idle = h("div", { class: "anb-idle", role: "region", "aria-label": "No output for a while", hidden: true }, h("span", { class: "anb-idle-mark", "aria-hidden": "true" }, "⚠"), warning, request);
  const text = h("div", { class: "anb-stacks-text", tabindex: "0", role: "group", "aria-label": "stacks of every rank" });
  const copy = copyButton("Copy", () => store.stacks?.text ?? "", view);
  const stacks = h(
    "div",
    { class: "anb-stacks", role: "region", "aria-label": "Stacks", hidden: true, onkeydown: (event) => event.key === "Escape" && putAway(event) },
    div("anb-section-head", span("anb-caption", "Stacks of all ranks"), span("anb-space"), copy, button("anb-plain-btn", "Close", putAway)),
    text,
  );
  const draw = () => {
    const { idleWarning } = store;
    show(idle, Boolean(idleWarning));
    show(request, view.canAct);
    if (idleWarning) setText(warning, idleWarning.text || `No output from any rank for ${duration(idleWarning.seconds)}.`);
    if (store.stacks === shown) return;
    shown = store.stacks;
    show(stacks, Boolean(shown));
    const blocks = shown ? shown.text.split(/\n(?=rank \d)/) : [];
    text.replaceChildren(...blocks.map((block) => {
      const [head, ...lines] = block.split("\n");
      // those that are elsewhere than the others stand out
      return div(head.includes("◀") ? "anb-stack anb-odd" : "anb-stack", div("anb-stack-head", head), lines.length ? h("div", { class: "anb-stack-lines" }, lines.join("\n")) : null);
    }));
    view.announce("The stacks have arrived");
  };
  return { element: div("anb-notices", idle, stacks), draw };
}
