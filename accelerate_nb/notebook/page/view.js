// One panel in the page: its parts, painted when something came, at most five times a second.

import { Charts } from "./charts.js";
import { announcer, div, h, keepFromNotebook, readTheme, set, watchTheme } from "./elements.js";
import { Head } from "./head.js";
import { Notices } from "./notices.js";
import { Output } from "./output.js";
import { Profile } from "./profile.js";
import { Ranks } from "./ranks.js";
import { acknowledge, kernelIsReachable } from "./store.js";

const PAINT = 200; // ms between two paintings
const TICKS_OF_TAB = 5; // between two writings of the tab's title
const FEW_RANKS = 16; // up to here each rank has a full row and a tab

/** Shows what a store knows. `send` is null where there is no kernel. */
export class View {
  constructor(store, send, liveParts) {
    const { element, announce } = announcer();
    Object.assign(this, { store, send, liveParts, live: element, announce });
    this.id = Math.random().toString(36).slice(2, 10);
    this.palette = { key: "" };
    this.restUntil = 0;
    this.epoch = store.epoch;
    this.changes = -1;
    this.ticks = 0;
    this.stopPressed = 0; // when
    this.build();
    this.watch();
  }

  build() {
    this.head = new Head(this);
    this.notices = new Notices(this);
    this.ranks = new Ranks(this);
    this.charts = new Charts(this);
    this.profile = new Profile(this);
    this.output = new Output(this);
    this.extras = this.liveParts.map((Part) => new Part(this));
    this.root = h(
      "div",
      { class: "anb", role: "region", "aria-label": "Distributed run", "data-lm-suppress-shortcuts": "true", "data-jp-suppress-context-menu": "true" },
      div("anb-inner", this.head.element, this.notices.element, ...this.extras.map((part) => part.element), div("anb-top", this.ranks.element, this.charts.element), this.profile.element, this.output.element, this.live),
    );
    keepFromNotebook(this.root);
    this.root.addEventListener("keydown", (event) => event.key === "Escape" && this.returnFocus());
  }

  watch() {
    this.visible = true;
    this.sight = new IntersectionObserver((entries) => {
      this.visible = entries.at(-1).isIntersecting;
      if (this.visible) this.draw();
    });
    this.sight.observe(this.root);
    this.unwatchTheme = watchTheme(() => this.readTheme());
    this.timer = setInterval(() => this.tick(), PAINT);
  }

  close() {
    clearInterval(this.timer);
    this.unwatchTheme();
    this.sight.disconnect();
    for (const part of [this.ranks, this.charts, this.output, ...this.extras]) part.close?.();
    this.store.views.delete(this);
    this.root.remove();
  }

  /** Goes on in another place of the page. */
  moveTo(place) {
    this.hasMoved = true;
    place.append(this.root);
    this.output.arrange();
    this.draw();
  }

  readTheme() {
    if (!this.root.isConnected) return;
    this.palette = readTheme(this.root);
    this.charts.themed();
  }

  // ----------------------------------------------------------------------------------------------------------- painting

  tick() {
    acknowledge(this.store, this.send);
    if (++this.ticks % TICKS_OF_TAB === 0) for (const part of this.extras) part.drawTab?.();
    if (document.hidden || !this.root.isConnected || !this.visible) return;
    // a run that falls silent, of which nothing comes
    if (this.progress?.silence(this.store) > 0 !== this.ranks.silent) this.changes = -1;
    if (this.store.changes === this.changes) {
      for (const part of [this.head, ...this.extras]) part.drawClock?.();
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
    if (!this.palette.key) this.readTheme();
    this.changes = this.store.changes;
    if (this.epoch !== this.store.epoch) this.forget();
    // canvases first: text on them asks for the page's style, which is reckoned anew after each change of the page
    if (!this.charts.paint()) this.changes = -1; // the others at the next tick
    set(this.root, "aria-label", `Distributed run ${this.store.run.name}`);
    for (const part of [this.head, this.notices, ...this.extras, this.ranks, this.charts, this.profile, this.output]) part.draw();
  }

  forget() {
    this.epoch = this.store.epoch;
    this.stopPressed = 0;
    for (const part of [this.ranks, this.charts, this.output]) part.forget();
  }

  // ------------------------------------------------------------------------------------------------ what the parts share

  get many() {
    return this.store.ranks.size > FEW_RANKS;
  }

  get canAct() {
    return Boolean(this.send) && this.store.run.can_act && kernelIsReachable(this.store);
  }

  /** Escape gives the keyboard back to the notebook. */
  returnFocus() {
    const notebook = this.root.closest(".jp-Notebook");
    if (notebook) notebook.focus();
    else document.activeElement?.blur?.();
  }
}

/** A view of a store in a place of the page; `liveParts` are classes of its other parts. */
export function openView(store, el, send, liveParts = []) {
  const view = new View(store, send, liveParts);
  store.views.add(view);
  el.append(view.root);
  view.draw();
  return view;
}
