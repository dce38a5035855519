// What can be asked of a live run: stop, stacks, knobs, profiles with their tables, a notification of its end; and its progress in the title of the browser's tab.

import { knobText } from "./chart.js";
import { button, div, h, section, set, setRanks, setStyle, setText, show, span } from "./elements.js";
import { count, duration, failureText, milliseconds, timeLeft } from "./format.js";
import { elapsed, END_STATES, runProgress } from "./store.js";

export class RunControls {
  constructor(view) {
    Object.assign(this, { view, store: view.store, titled: "" }); // what stands before the title in the tab
    this.stop = button("anb-stop", "Stop", () => this.pressStop());
    this.stacks = button("", "Stacks", () => view.requestStacks(), { title: "Show the current stack of every rank" });
    const freeze = () => {
      this.store.following = !this.store.following;
      view.announce(this.store.following ? "Following the run" : "The view is frozen");
      view.draw();
    };
    this.pause = button("", "Freeze view", freeze, { title: "Freeze this view; the run continues" });
    view.controls = this;
    view.head.buttons.append(this.pause, this.stacks, this.stop);
  }

  /** Shows in the tab how far the run is, also while nobody looks at the page. */
  drawTab() {
    const { share, left } = runProgress(this.store);
    const isKnown = left !== null && !this.store.idleWarning;
    const over = END_STATES.has(this.store.state.state);
    const parts = over || share === null ? [] : [`${Math.floor(share * 100)} %`, ...(isKnown ? [`${timeLeft(left)} left`] : [])];
    this.showInTab(this.view.canAct ? parts.join(" · ") : "");
  }

  /** Shows a text, or with none the page's own title; a notebook that writes its title anew has it put before that, too. */
  showInTab(text) {
    if (!text && !this.titled) return;
    this.titled = text;
    const own = document.title.replace(/^\u2800[^\u2800]*\u2800 /, ""); // between blank signs, so that it is found again
    const title = text ? `\u2800${text}\u2800 ${own}` : own;
    if (document.title !== title) document.title = title;
  }

  close() {
    this.showInTab("");
  }

  pressStop() {
    if (this.stop.dataset.step === "kill") {
      this.view.send({ do: "kill" });
      setText(this.stop, "Killing…");
      this.stop.disabled = true;
      return;
    }
    this.view.send({ do: "stop" });
    this.view.announce("Stopping");
    this.view.stopPressed = performance.now();
    this.view.draw();
  }

  // A second press kills; for a second after the first one it waits, so that a double click does not.
  draw() {
    show(this.pause, this.store.run.background);
    setText(this.pause, this.store.following ? "Freeze view" : "Unfreeze view");
    setText(this.stacks, this.store.stacksRequested ? "Asking…" : "Stacks");
    const over = END_STATES.has(this.store.state.state);
    show(this.stop, !over);
    if (over || this.stop.textContent === "Killing…") return;
    const requested = this.view.stopPressed > 0 || this.store.state.state === "stopping";
    const waits = requested && performance.now() - this.view.stopPressed < 1000 && this.view.stopPressed > 0;
    const hadFocus = document.activeElement === this.stop;
    setText(this.stop, !requested ? "Stop" : waits ? "Stopping…" : "Kill");
    set(this.stop, "data-step", requested && !waits ? "kill" : "stop");
    set(this.stop, "title", requested ? "End every process at once" : "End every rank at its next step");
    if (this.stop.disabled !== waits) this.stop.disabled = waits;
    if (hadFocus && !waits) this.stop.focus({ preventScroll: true });
  }
}

/** A knob's label, its input, and what became of the last change. */
function knobRow(view, name) {
  let asked = null; // the value that was sent, until it counts or is refused
  let shown = null;
  const send = (event) => {
    event.preventDefault();
    const text = input.value.trim();
    const value = Number(text);
    asked = text === "" || !Number.isFinite(value) ? text : value;
    view.store.knobErrors.delete(name);
    view.send({ do: "knob", name, value: asked });
    view.draw();
  };
  const hint = h("span", { class: "anb-knob-hint" });
  const input = h("input", { type: "text", inputmode: "decimal", class: "anb-search anb-knob-value", autocomplete: "off", "aria-label": `knob ${name}` });
  const element = h("form", { class: "anb-knob", onsubmit: send }, span("anb-knob-name", name), input, button("", "Set", null, { type: "submit", "aria-label": `Set knob ${name}` }), hint);
  const draw = ({ value, least, most }, error) => {
    if (asked === value || error) {
      if (asked !== null) view.announce(error ?? `${name} is ${knobText(value)} on all ranks`);
      asked = null;
    }
    if (shown !== value && document.activeElement !== input) input.value = String((shown = value));
    const bounds = [least === null ? "" : `from ${knobText(least)}`, most === null ? "" : `to ${knobText(most)}`].filter(Boolean).join(" ");
    setText(hint, error ?? (asked === null ? [`now ${knobText(value)}`, bounds].filter(Boolean).join(", ") : "changes after a step that all ranks come to…"));
    set(input, "aria-invalid", Boolean(error));
    hint.classList.toggle("anb-bad", Boolean(error));
  };
  return { element, draw };
}

/** All knobs, while the run can be acted on. */
export function knobsOf(view) {
  const rows = new Map();
  const element = h("div", { class: "anb-knobs", role: "group", "aria-label": "Knobs", hidden: true });
  const draw = () => {
    const { knobs, knobErrors, state } = view.store;
    show(element, knobs.size > 0 && view.canAct && !END_STATES.has(state.state));
    for (const [name, row] of rows) if (!knobs.has(name) && rows.delete(name)) row.element.remove();
    for (const [name, knob] of knobs) {
      if (!rows.has(name)) {
        rows.set(name, knobRow(view, name));
        element.append(rows.get(name).element);
      }
      rows.get(name).draw(knob, knobErrors.get(name));
    }
  };
  return { element, draw };
}

const STEPS = 10; // as in Run.profile

/** What starts a profile, and says how that goes; all of it stands among the tools of the ranks. */
export function profiling(view) {
  const { store } = view;
  const press = () => {
    Object.assign(store, { profileRequested: true, profileError: "" });
    view.send({ do: "profile", ranks: select.value === "all" ? null : [Number(select.value)] });
    view.draw();
  };
  const select = h("select", { class: "anb-select", "aria-label": "ranks to profile" });
  const start = button("", `Profile ${STEPS} steps`, press, { title: `Run torch's profiler on the next ${STEPS} optimizer steps; the run goes on` });
  const controls = span("anb-profiling-controls", select, start);
  const status = h("span", { class: "anb-profiling", role: "status" });
  view.ranks.tools.append(span("anb-space"), status, controls);
  const draw = () => {
    const { ranks, state, profileRequested, profileError } = store;
    const running = [...ranks.values()].filter((rankState) => rankState.state === "running");
    show(controls, view.canAct && state.state === "running" && running.length > 0);
    show(select, ranks.size > 1);
    const { value } = select;
    setRanks(select, ["all", ...ranks.keys()]);
    // of many ranks the first is chosen, since each writes a trace
    if (!value && view.many) select.value = String(ranks.keys().next().value);
    const waits = running.filter((rankState) => rankState.profiling).map(({ rank }) => rank);
    const names = waits.length === ranks.size && waits.length > 1 ? "all ranks" : `${waits.length === 1 ? "rank" : "ranks"} ${waits.join(", ")}`;
    const going = waits.length ? `Profiling ${names}: the next ${ranks.get(waits[0]).profiling} steps…` : profileRequested ? "Requested a profile…" : "";
    setText(status, profileError || going);
    status.classList.toggle("anb-bad", profileError !== "");
    show(status, status.textContent !== "");
  };
  return { draw };
}

const COLUMNS = ["operation", "calls", "self time", "share"]; // as in reports/report.py

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
  const [{ rank, profile } = {}] = newestProfiles(ranks);
  if (!profile) return "";
  return [`rank ${rank}: ${profileHead(rank, profile)}`, ...cellsOf(profile).map((cells) => cells.join("  ")), profile.trace].filter(Boolean).join("\n");
}

/** The newest profiles: of one rank, which a person may choose. */
export function profilesOf(view) {
  const { store } = view;
  let chosen = null; // the rank that a person has chosen among those of the newest profile
  let newestNumber = 0; // of the newest profile
  let drawn = null;
  const pick = () => {
    chosen = Number(select.value);
    draw();
  };
  const requestTrace = () => {
    view.send({ do: "trace", rank: Number(select.value) });
    view.announce(`Requested the trace of rank ${select.value}`);
  };
  const select = h("select", { class: "anb-select", "aria-label": "rank whose profile is shown", onchange: pick });
  const [head, path] = [span("anb-profile-head"), span("anb-trace-path")];
  const download = button("anb-plain-btn", "Trace", requestTrace, { title: "save the trace, which ui.perfetto.dev opens" });
  const table = h("div", { class: "anb-profile-table", role: "table", "aria-label": "costliest operations" });
  const trace = div("anb-tools anb-trace", "Trace: ", path);
  const element = section("profile", "Profile", div("anb-tools", select, head, span("anb-space"), download), table, trace);
  show(element, false); // not even until the first painting
  const draw = () => {
    const newest = newestProfiles([...store.ranks.values()]);
    show(element, newest.length > 0);
    if (!newest.length) return;
    const { number } = newest[0].profile;
    if (number !== newestNumber) chosen = null;
    // a restart may have fewer ranks
    const { rank, profile } = newest.find(({ rank }) => rank === chosen) ?? newest[0];
    if (number > newestNumber) view.announce(`Profile: ${profileHead(newest[0].rank, newest[0].profile)}`);
    newestNumber = number;
    show(select, store.ranks.size > 1);
    setRanks(select, newest.map(({ rank }) => rank).sort((a, b) => a - b));
    select.value = String(rank);
    setText(head, profileHead(rank, profile));
    show(download, view.canAct && profile.trace !== "");
    show(trace, profile.trace !== "");
    setText(path, profile.trace);
    show(table, profile.operations.length > 0);
    if (drawn === profile) return;
    drawn = profile;
    const rows = cellsOf(profile).map(([name, ...numbers], i) => {
      const row = h("div", { class: "anb-profile-row", role: "row" }, h("div", { class: "anb-profile-name", role: "cell", title: name }, name), ...numbers.map((text) => h("div", { class: "anb-num", role: "cell" }, text)));
      // the share is drawn behind its number
      setStyle(row.lastChild, "backgroundSize", `${(100 * profile.operations[i][3]).toFixed(1)}% 100%`);
      return row;
    });
    const titles = h("div", { class: "anb-profile-row anb-header", role: "row" }, ...COLUMNS.map((title) => h("div", { role: "columnheader" }, title)));
    table.replaceChildren(titles, ...rows);
  };
  return { element, draw };
}

const LONG = 60; // seconds that a run has to take
const KEY = "accelerate-nb-notify";

function isOn() {
  try {
    return window.Notification?.permission === "granted" && localStorage.getItem(KEY) === "on";
  } catch {
    return false; // a frame that may remember nothing has forgotten
  }
}

/** The bell among the buttons of the panel's head; the browser's permission is requested at a press alone. */
export function bell(view) {
  const press = async () => {
    const wanted = !isOn();
    if (wanted && Notification.permission === "default") await Notification.requestPermission();
    const forbidden = wanted && Notification.permission !== "granted";
    if (!forbidden) localStorage.setItem(KEY, wanted ? "on" : "off");
    const text = forbidden ? "The browser does not let this page show notifications: change that in the settings of the site" : `Notifications are ${wanted ? "on" : "off"}`;
    set(toggle, "title", text);
    view.announce(text);
    draw();
  };
  const draw = () => set(toggle, "aria-pressed", isOn());
  const toggle = button("anb-plain-btn anb-bell", "", press, { "aria-label": "Notify me when the run is over", title: "A notification of the browser when a run of more than a minute is over" });
  if (window.Notification) view.head.buttons.prepend(toggle);
  return { draw };
}

/** Notifies of the end of a run that took a while; one that several pages show is notified of once. */
export function notifyOfEnd(store) {
  if (!isOn() || elapsed(store) < LONG) return;
  const { run, state, failure, gone } = store;
  const why = failure ? failureText(failure) : gone;
  const body = [`after ${duration(elapsed(store))}`, why].filter(Boolean).join(", ");
  const notification = new Notification(`${run.name} ${state.state}`, { body: body.slice(0, 300), tag: run.folder });
  notification.onclick = () => {
    window.focus();
    [...store.views].at(-1)?.root.scrollIntoView({ block: "nearest" });
  };
}
