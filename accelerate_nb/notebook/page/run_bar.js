// A line of a run that stays in sight while a person scrolls through the notebook: in JupyterLab and Notebook.

import { button, chip, div, h, set, setStyle, setText, show, span } from "./elements.js";
import { runProgress } from "./progress.js";
import { END_STATES } from "./store.js";

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
    this.build();
    this.sight = new IntersectionObserver((entries) => {
      this.isAway = !entries.at(-1).isIntersecting;
      this.update();
    });
    this.sight.observe(view.head.element);
    this.timer = setInterval(() => document.hidden || this.update(), BETWEEN);
  }

  build() {
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
    for (const kind of ["keydown", "keyup", "keypress", "mousedown"]) this.bar.addEventListener(kind, (event) => event.stopPropagation());
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

  /** Finds what scrolls, and where in it the panel is. */
  locate() {
    const { root } = this.view;
    if (!this.hasPlace) return;
    const notebook = root.closest(".jp-Notebook");
    this.scroller = notebook?.querySelector(":scope > .jp-WindowedPanel-outer") ?? notebook;
    if (!this.scroller) return;
    this.offset = this.scroller.scrollTop + root.getBoundingClientRect().top - this.scroller.getBoundingClientRect().top;
  }

  put() {
    if (this.bar.isConnected) return;
    let bars = this.scroller.querySelector(":scope > .anb-bars");
    if (!bars) this.scroller.prepend((bars = div("anb-bars")));
    bars.append(this.bar);
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
    this.locate();
    this.draw();
    // when the run ends another view takes over
    const isLast = [...store.views].at(-1) === this.view;
    if (this.isAway === null || !this.scroller || (END_STATES.has(store.state.state) && !isLast)) return;
    if (!this.isPinned || !this.isAway || !this.isNeeded) {
      this.takeAway();
      return;
    }
    if (this.shared.shown !== this) this.shared.shown?.takeAway();
    this.shared.shown = this;
    this.put();
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
    const isOver = END_STATES.has(store.state.state);
    this.bar.classList.toggle("anb-over", isOver);
    const { over } = this;
    show(this.bar, !isOver || over[0] === this.bar);
    if (over[0] === this.bar && over.length > 1) setText(this.facts, `${this.facts.textContent} · and ${over.slice(1).map(({ anbRun: { name, chip } }) => `${name.textContent} ${chip.element.dataset.state}`).join(", ")}`);
  }

  /** The lines of runs that are over: one stands for all of them. */
  get over() {
    return [...(this.bar.parentElement?.querySelectorAll(":scope > .anb-over") ?? [])];
  }

  /** One line is enough. A run that ends in sight needs none; one that ends out of sight has it until it was seen. */
  get isNeeded() {
    const { shown } = this.shared;
    return END_STATES.has(this.view.store.state.state) ? shown : !shown || shown === this;
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
