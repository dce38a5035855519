// The profile of steps: the operations that took the most time in themselves, of one rank at a time, and its trace.

import { button, div, h, section, setRanks, setStyle, setText, show, span } from "./elements.js";
import { count, milliseconds } from "./format.js";

const COLUMNS = ["operation", "calls", "self time", "share"]; // as in reports/profile_table.py

/** A profile in a line. */
function profileHead(rank, { steps, seconds, problem, operations }) {
  if (problem) return `rank ${rank} was not profiled: ${problem}`;
  const device = operations[0]?.[4] ?? "cpu";
  return `${count(steps)} ${steps === 1 ? "step" : "steps"}, ${milliseconds((1000 * seconds) / steps)} a step; time on the ${device.toUpperCase()}`;
}

const cellsOf = ({ operations }) => operations.map(([name, calls, seconds, share]) => [name, count(calls), milliseconds(1000 * seconds), `${(100 * share).toFixed(1)} %`]);

/** The ranks of the newest profile, those with a table first. */
function newestProfiles(ranks) {
  const number = Math.max(...ranks.map(({ profile }) => profile?.number ?? 0));
  const newest = ranks.filter(({ profile }) => profile?.number === number);
  return newest.sort((a, b) => Boolean(a.profile.problem) - Boolean(b.profile.problem));
}

/** The newest profile of the first rank that has it, as text. */
export function profileText(ranks) {
  const [first] = newestProfiles(ranks);
  if (!first) return "";
  const { rank, profile } = first;
  return [`rank ${rank}: ${profileHead(rank, profile)}`, ...cellsOf(profile).map((cells) => cells.join("  ")), profile.trace].filter(Boolean).join("\n");
}

export class Profile {
  constructor(view) {
    this.view = view;
    this.store = view.store;
    this.chosen = null; // the rank that is shown
    this.picked = false; // whether a person has chosen it
    this.number = 0; // of the newest profile
    const pick = () => {
      Object.assign(this, { chosen: Number(this.select.value), picked: true });
      this.draw();
    };
    this.select = h("select", { class: "anb-select", "aria-label": "rank whose profile is shown", onchange: pick });
    this.head = span("anb-profile-head");
    this.download = button("anb-plain-btn", "Trace", () => this.requestTrace(), { title: "save the trace, which ui.perfetto.dev opens" });
    this.table = h("div", { class: "anb-profile-table", role: "table", "aria-label": "costliest operations" });
    this.path = span("anb-trace-path");
    this.trace = div("anb-tools anb-trace", "Trace: ", this.path);
    this.element = section("profile", "Profile", div("anb-tools", this.select, this.head, span("anb-space"), this.download), this.table, this.trace);
    show(this.element, false); // not even until the first painting
  }

  draw() {
    const newest = newestProfiles([...this.store.ranks.values()]);
    show(this.element, newest.length > 0);
    if (!newest.length) return;
    const { number } = newest[0].profile;
    this.picked &&= number === this.number;
    if (!this.picked) this.chosen = newest[0].rank;
    if (number > this.number) this.view.announce(`Profile: ${profileHead(newest[0].rank, newest[0].profile)}`, true);
    this.number = number;
    show(this.select, this.store.ranks.size > 1);
    setRanks(this.select, newest.map(({ rank }) => rank).sort((a, b) => a - b));
    this.select.value = String(this.chosen);
    const { profile } = this.store.ranks.get(this.chosen);
    setText(this.head, profileHead(this.chosen, profile));
    show(this.download, this.view.canAct && profile.trace !== "");
    show(this.trace, profile.trace !== "");
    setText(this.path, profile.trace);
    show(this.table, profile.operations.length > 0);
    if (this.drawn === profile) return;
    this.drawn = profile;
    this.table.replaceChildren(
      h("div", { class: "anb-profile-row anb-header", role: "row" }, ...COLUMNS.map((title) => h("div", { role: "columnheader" }, title))),
      ...cellsOf(profile).map((cells, i) => operationRow(cells, profile.operations[i][3])),
    );
  }

  requestTrace() {
    this.view.send({ do: "trace", rank: this.chosen });
    this.view.announce(`Requested the trace of rank ${this.chosen}`);
  }
}

/** An operation's row, its share drawn behind the number. */
function operationRow([name, ...numbers], share) {
  const row = h("div", { class: "anb-profile-row", role: "row" }, h("div", { class: "anb-profile-name", role: "cell", title: name }, name), ...numbers.map((text) => h("div", { class: "anb-num", role: "cell" }, text)));
  setStyle(row.lastChild, "backgroundSize", `${(100 * share).toFixed(1)}% 100%`);
  return row;
}
