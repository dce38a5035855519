// The table of ranks, with an overview where they are many, and the machine they run on.

import { div, h, setText, set, setStyle, show, span } from "./elements.js";
import { isKnown, ofBytes } from "./format.js";
import { meter, section } from "./controls.js";
import { progressOf, shareOf } from "./progress.js";
import { RankRow } from "./rank_row.js";
import { SYMBOLS } from "./states.js";

const ROW = 27; // height of a rank's row in pixels

export class Ranks {
  constructor(view) {
    this.view = view;
    this.store = view.store;
    this.rows = new Map(); // rank -> RankRow
    this.cells = new Map(); // rank -> its cell of the overview
    this.meters = new Map(); // name of what the machine has -> its meter
    this.strip = h("div", { class: "anb-strip", role: "group", "aria-label": "all ranks", onkeydown: (event) => this.stripKey(event) });
    this.header = h("div", { class: "anb-row anb-header", role: "row" });
    this.table = h("div", { class: "anb-table", role: "table", "aria-label": "ranks" }, this.header);
    this.box = div("anb-table-box", this.table);
    this.box.addEventListener("scroll", () => this.draw());
    this.host = h("div", { class: "anb-host", role: "group", "aria-label": "this machine" });
    this.element = section("ranks", "Ranks", div("anb-tools"), this.strip, this.box, this.host);
  }

  forget() {
    for (const row of this.rows.values()) row.element.remove();
    for (const items of [this.rows, this.cells, this.meters]) items.clear();
    this.strip.replaceChildren();
    this.host.replaceChildren();
    delete this.header.dataset.titles;
  }

  draw() {
    const { ranks, metrics } = this.store;
    const { many } = this.view;
    const names = [...metrics.keys()].slice(0, 3);
    this.drawHeader(names);
    show(this.strip, many);
    this.box.classList.toggle("anb-scrolls", many);
    set(this.box, "tabindex", many ? 0 : -1);
    // of many rows only those in sight are painted
    const first = many ? Math.floor(this.box.scrollTop / ROW) - 2 : 0;
    let place = 0;
    for (const [rank, rankState] of ranks) {
      let row = this.rows.get(rank);
      if (!row) {
        row = new RankRow(rank, () => this.view.pick(rank));
        this.rows.set(rank, row);
        this.table.append(row.element);
        row.draw(rankState, names);
      } else if (place >= first && place < first + 16) row.draw(rankState, names);
      place++;
      if (many) this.drawCell(rank, rankState);
    }
    this.drawHost();
  }

  drawHeader(names) {
    const devices = [...this.store.ranks.values()].flatMap((rankState) => [...rankState.devices.values()]);
    // where no rank's device tells how busy it is, that takes no room
    this.table.classList.toggle("anb-shows-utilisation", devices.some((device) => isKnown(device.utilisation)));
    const titles = ["", "state", "progress", ...names, ...(devices.length ? ["device"] : [])];
    if (this.header.dataset.titles === titles.join()) return;
    this.header.dataset.titles = titles.join();
    this.table.style.setProperty("--anb-columns", `auto auto minmax(0, 1fr) repeat(${Math.max(names.length, 1)}, auto) auto`);
    this.table.classList.toggle("anb-no-metrics", !names.length);
    this.header.replaceChildren(
      ...titles.map((title, i) =>
        h(
          "div",
          { class: names.includes(title) && i > 2 ? "anb-cell anb-num anb-metric-name" : "anb-cell", role: "columnheader", title },
          title || span("anb-sr", "rank"),
        ),
      ),
    );
  }

  drawCell(rank, rankState) {
    let cell = this.cells.get(rank);
    if (!cell) {
      const pick = () => this.view.pick(rank);
      cell = h("button", { type: "button", class: "anb-heat", tabindex: this.cells.size ? -1 : 0, onclick: pick }, div("anb-heat-fill"), span("anb-heat-text"));
      this.cells.set(rank, cell);
      this.strip.append(cell);
    }
    const share = shareOf(progressOf(rankState).bar);
    const text = `rank ${rank}: ${rankState.state}, ${Math.round(share * 100)} %`;
    set(cell, "data-state", rankState.state);
    setStyle(cell.firstChild, "transform", `scaleY(${share.toFixed(3)})`);
    setText(cell.lastChild, rankState.state === "running" ? String(rank) : `${SYMBOLS[rankState.state] ?? ""}${rank}`);
    set(cell, "aria-label", text);
    set(cell, "title", text);
    cell.classList.toggle("anb-chosen", rank === this.view.chosen);
  }

  stripKey(event) {
    const cells = [...this.strip.children];
    const index = cells.indexOf(document.activeElement);
    const goal = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: cells.length - 1 }[event.key];
    if (goal === undefined || index < 0) return;
    event.preventDefault();
    const next = cells[(goal + cells.length) % cells.length];
    cells[index].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  drawHost() {
    for (const [name, used, total, unit] of this.store.host) {
      let gauge = this.meters.get(name);
      if (!gauge) {
        gauge = { meter: meter(name), text: span("anb-num") };
        this.meters.set(name, gauge);
        this.host.append(div("anb-host-one", span("anb-host-name", name === "cpu" ? "CPU" : name), gauge.meter.element, gauge.text));
      }
      const share = total ? used / total : 0;
      const text = unit === "%" ? `${Math.round(used)} %` : ofBytes(used, total);
      const alarms = name !== "cpu"; // a busy machine is a good thing
      gauge.meter.set(share, text, alarms);
      setText(gauge.text, alarms && share > 0.9 ? `⚠ ${text}` : text);
    }
    show(this.host, this.store.host.length > 0);
  }
}
