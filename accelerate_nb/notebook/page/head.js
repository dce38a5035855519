// The head of the panel: what runs, how it is, and since when.

import { chip, div, h, set, setText, show, span } from "./elements.js";
import { clockOfDay, count, duration, timeLeft } from "./format.js";
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
    set(this.facts, "title", [deviceNames(ranks), `${count(lineCount)} ${lineCount === 1 ? "line" : "lines"}`, run.why].filter(Boolean).join("\n"));
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
      const { texts, left } = this.view.progress?.runProgress(this.store) ?? { texts: [], left: null };
      const silent = this.view.progress?.silence(this.store);
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
  const names = [...ranks.values()].flatMap((rankState) => [...rankState.devices.keys()]);
  const kinds = [...new Set(names.map((name) => name.split(":")[0]))];
  if (!kinds.length) return `${size} ${size === 1 ? "rank" : "ranks"}`;
  return `${size} × ${kinds.map((kind) => (kind === "cuda" ? "GPU" : kind.toUpperCase())).join("/")}`;
}

/** "cuda:0 … cuda:7", where devices are known. */
function deviceNames(ranks) {
  const names = [...new Set([...ranks.values()].flatMap((rankState) => [...rankState.devices.keys()]))];
  if (!names.length) return "";
  return names.length === 1 ? names[0] : `${names[0]} … ${names.at(-1)}`;
}
