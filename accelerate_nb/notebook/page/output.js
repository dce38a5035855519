// What the ranks wrote: of all of them, of one, or side by side, with the tools to read it.

import { button, copyButton, div, h, placeByKey, section, set, setRanks, setText, show, span } from "./elements.js";
import { count } from "./format.js";
import { LogView } from "./log_view.js";
import { END_STATES, openLines } from "./store.js";

export class Output {
  constructor(view) {
    Object.assign(this, { view, store: view.store, chosen: "all", side: false });
    this.logs = new Map(); // place and "all" or rank -> LogView
    this.settings = { query: "", only: false, errors: false, times: false, wrap: false };
    this.foundIn = null; // the log that the search stands in
    this.tabs = h("div", { class: "anb-tabs", role: "tablist", "aria-label": "whose output", onkeydown: (event) => this.tabKey(event) });
    this.select = h("select", { class: "anb-select", "aria-label": "whose output", onchange: () => this.pick(this.select.value === "all" ? "all" : Number(this.select.value)) });
    this.panel = h("div", { class: "anb-output", id: `anb-${view.id}-output`, role: "tabpanel", onscroll: () => this.drawLogs() });
    this.path = span("anb-path");
    this.folder = div("anb-tools anb-folder", "All output: ", this.path, copyButton("Copy path", () => this.store.run.folder, view));
    this.search = h("input", {
      class: "anb-search", type: "search", placeholder: "Search", "aria-label": "search in the output",
      oninput: () => this.configure({ query: this.search.value.toLowerCase() }), onkeydown: (event) => this.searchKey(event),
    });
    this.found = h("span", { class: "anb-found", role: "status", "aria-live": "polite" });
    this.previous = button("anb-mini", "↑", () => this.step(-1), { "aria-label": "previous match", title: "previous match (Shift+Enter)" });
    this.next = button("anb-mini", "↓", () => this.step(1), { "aria-label": "next match", title: "next match (Enter)" });
    const toggle = (name, label, title) => button("anb-plain-btn", label, () => this.configure({ [name]: !this.settings[name] }), { "aria-pressed": "false", title });
    this.toggles = {
      only: toggle("only", "Only matches", "hide lines that do not match"),
      errors: toggle("errors", "Errors only", "hide lines that are no errors"),
      times: toggle("times", "Times", "when each line was written"),
      wrap: toggle("wrap", "Wrap", "break long lines instead of scrolling to their end"),
    };
    this.sideButton = button("anb-plain-btn", "Side by side", () => this.arrange({ side: !this.side }), { "aria-pressed": "false" });
    this.followButton = button("anb-plain-btn", "Follow", () => this.toggleFollow(), { "aria-pressed": "true", title: "keep the newest line in view" });
    const copy = copyButton("Copy", () => this.shown().map((log) => log.text()).join("\n"), this.view);
    this.file = button("anb-plain-btn", "Whole file", () => this.requestLog(this.singleRank), { title: "save everything this rank has written" });
    const tools = div(
      "anb-tools",
      div("anb-searching", this.search, this.previous, this.next, this.found), this.toggles.only, this.toggles.errors,
      span("anb-space"), this.toggles.wrap, this.toggles.times, this.sideButton, this.followButton, copy, this.file,
    );
    this.element = section("output", "Output", div("anb-tools anb-whose", this.tabs, this.select), tools, this.panel, this.folder);
    new ResizeObserver(() => {
      for (const log of this.shown()) log.measure();
      view.draw();
    }).observe(this.panel);
  }

  forget() {
    this.logs.clear();
    delete this.select.dataset.ranks;
  }

  draw() {
    if (this.select.dataset.ranks !== this.choices().join()) this.arrange();
    this.drawLogs();
    this.drawTools();
  }

  /** Each step for all logs: what asks for a layout comes before, or after, all that changes it. */
  drawLogs() {
    const panel = this.side ? this.panel.getBoundingClientRect() : null;
    // side by side, only the logs that the box shows are painted
    const logs = this.shown().filter(({ element }) => {
      const box = panel && element.getBoundingClientRect();
      return !panel || (box.top < panel.bottom && box.bottom > panel.top);
    });
    for (const log of logs) log.paint();
    for (const log of logs) log.settle();
  }

  log(which, place) {
    const key = `${place}-${which}`;
    if (this.logs.has(key)) return this.logs.get(key);
    const all = which === "all";
    const rankState = () => this.store.ranks.get(which);
    const log = new LogView({
      ring: () => (all ? this.store.all : (rankState()?.ring ?? this.store.all)),
      open: () => (all ? openLines(this.store) : [...(rankState()?.open.values() ?? [])]),
      showRank: () => all && this.store.ranks.size > 1,
      label: all ? "output of all ranks" : `output of rank ${which}`,
      changed: () => this.drawTools(),
      isOver: () => END_STATES.has(this.store.state.state),
    });
    this.logs.set(key, log);
    log.configure(this.settings);
    return log;
  }

  /** The logs that are on the page now. */
  shown() {
    return this.side ? [...this.store.ranks.keys()].map((rank) => this.log(rank, "side")) : [this.log(this.chosen, "one")];
  }

  configure(changes) {
    Object.assign(this.settings, changes);
    for (const [name, toggle] of Object.entries(this.toggles)) set(toggle, "aria-pressed", this.settings[name]);
    for (const log of this.logs.values()) log.configure(this.settings);
    this.drawTools();
  }

  pick(which) {
    this.arrange({ chosen: which, side: false });
  }

  toggleFollow() {
    const follow = !this.shown().every((log) => log.follow);
    for (const log of this.shown()) {
      if (follow) log.toNewest();
      else log.follow = false;
      log.draw();
    }
    this.followButton.focus();
    this.drawTools();
  }

  /** Puts the logs into the page that are chosen now: "all" ranks or one, or ranks side by side. */
  arrange(chosen = {}) {
    Object.assign(this, chosen);
    // a restart may have fewer ranks
    if (!this.store.ranks.has(this.chosen)) this.chosen = "all";
    const ranks = [...this.store.ranks.keys()];
    const sideBox = (log, rank) => {
      const file = button("anb-mini", "⤓", () => this.requestLog(rank), { "aria-label": `whole file of rank ${rank}`, title: "whole file" });
      return div("anb-side-box", div("anb-side-head", span(`anb-rank anb-r${rank % 8}`, String(rank)), `rank ${rank}`, span("anb-space"), file), log.element);
    };
    this.panel.classList.toggle("anb-side", this.side);
    this.panel.replaceChildren(...this.shown().map((log, i) => (this.side ? sideBox(log, ranks[i]) : log.element)));
    this.drawTabs();
    // a log that was taken out of the page and put back has forgotten where it stood
    for (const log of this.shown()) if (!log.follow) log.scroller.scrollTop = log.top;
    this.drawLogs();
    this.drawTools();
  }

  requestLog(rank) {
    this.view.send({ do: "log", rank });
    this.view.announce(`Requested the whole output of rank ${rank}`);
  }

  choices() {
    return ["all", ...this.store.ranks.keys()];
  }

  drawTabs() {
    const choices = this.choices();
    const { many } = this.view;
    show(this.tabs, !many && choices.length > 2);
    show(this.select, many);
    const nameOf = (choice) => (choice === "all" ? "all ranks" : `rank ${choice}`);
    const tab = (choice) => h(
      "button",
      { type: "button", role: "tab", class: choice === "all" ? "anb-tab" : `anb-tab anb-r${choice % 8}`, "aria-controls": this.panel.id, "aria-label": nameOf(choice), onclick: () => this.pick(choice) },
      choice === "all" ? "All ranks" : String(choice),
    );
    if (choices.join() !== this.select.dataset.ranks) {
      setRanks(this.select, choices);
      this.tabs.replaceChildren(...(many ? [] : choices.map(tab)));
    }
    this.select.value = String(this.chosen);
    [...this.tabs.children].forEach((tab, i) => {
      set(tab, "aria-selected", choices[i] === this.chosen && !this.side);
      tab.tabIndex = choices[i] === this.chosen ? 0 : -1;
    });
    const isTab = !this.tabs.hidden && !this.side;
    set(this.panel, "role", isTab ? "tabpanel" : "group");
    set(this.panel, "aria-label", isTab ? nameOf(this.chosen) : "output");
  }

  tabKey(event) {
    const choices = this.choices();
    const next = placeByKey(event, choices.indexOf(this.chosen), choices.length);
    if (next === null) return;
    this.pick(choices[next]);
    this.tabs.children[next].focus();
  }

  /** The rank whose output alone is shown, or null. */
  get singleRank() {
    if (this.chosen !== "all") return this.chosen;
    return this.store.ranks.size === 1 ? this.store.ranks.keys().next().value : null;
  }

  searchKey(event) {
    if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") {
      event.stopPropagation();
      if (this.search.value) {
        this.search.value = "";
        this.configure({ query: "" });
      } else this.shown()[0]?.scroller.focus();
    }
  }

  /** Goes to the next (1) or the previous (-1) match, through all logs that are shown. */
  step(by) {
    const all = this.shown().flatMap((log) => log.matches.map((line, index) => ({ log, line, index })));
    if (!all.length) return;
    const index = all.findIndex(({ log, line }) => log === this.foundIn && log.current === line);
    const next = all[index < 0 ? (by > 0 ? 0 : all.length - 1) : (index + by + all.length) % all.length];
    if (this.foundIn && this.foundIn !== next.log) this.foundIn.current = null;
    this.foundIn = next.log;
    next.log.element.scrollIntoView({ block: "nearest" });
    next.log.goTo(next.index);
  }

  drawTools() {
    const logs = this.shown();
    setText(this.found, this.settings.query ? this.foundText(logs) : "");
    setText(this.path, this.store.run.folder);
    show(this.folder, this.store.run.folder !== "");
    this.previous.disabled = this.next.disabled = !logs.some((log) => log.matches.length);
    set(this.followButton, "aria-pressed", logs.every((log) => log.follow));
    set(this.sideButton, "aria-pressed", this.side);
    show(this.sideButton, this.store.ranks.size > 1);
    show(this.file, this.view.canAct && !this.side && this.singleRank !== null);
  }

  /** "3 of 12" where the search stands at a match, else how many there are; and what was searched, where the page does not hold all lines. */
  foundText(logs) {
    const matches = (some) => some.reduce((sum, log) => sum + log.matches.length, 0);
    const total = matches(logs);
    const at = logs.indexOf(this.foundIn);
    const index = at < 0 || this.foundIn.current === null ? -1 : this.foundIn.matches.indexOf(this.foundIn.current);
    const found = index >= 0 ? `${count(matches(logs.slice(0, at)) + index + 1)} of ${count(total)}` : total === 1 ? "1 match" : `${count(total)} matches`;
    const held = logs.reduce((sum, log) => sum + log.source.length, 0);
    const written = this.side || this.chosen === "all" ? this.store.lineCount : (this.store.ranks.get(this.chosen)?.lineCount ?? held);
    return written > held ? `${found} in the last ${count(held)} of ${count(written)} lines` : found;
  }
}
