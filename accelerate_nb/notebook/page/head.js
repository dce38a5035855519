// The head of the panel: what runs, how it is, since when, and what can be asked of it.

import { button, div, h, setText, set, show, span } from "./elements.js";
import { count, duration } from "./format.js";
import { chip } from "./controls.js";
import { END_STATES } from "./states.js";
import { elapsed } from "./store.js";

const IDLE_AFTER = 30; // seconds without a message after which that is said

export class Head {
  constructor(view) {
    this.view = view;
    this.store = view.store;
    this.stopPressed = 0;
    this.state = null;
    this.name = h("span", { class: "anb-name", role: "heading", "aria-level": "3" });
    this.chip = chip();
    this.time = h("span", { class: "anb-elapsed", title: "elapsed" });
    this.facts = span("anb-facts");
    this.why = span("anb-why");
    this.notes = span("anb-notes");
    this.stop = button("anb-stop", "Stop", () => this.pressStop());
    this.stacks = button("", "Stacks", () => view.requestStacks(), { title: "Show the current stack of every rank" });
    this.pause = button("", "Pause", () => this.pressPause(), { title: "Pause this panel; the run continues" });
    this.buttons = div("anb-buttons", this.pause, this.stacks, this.stop);
    this.element = div(
      "anb-head",
      div("anb-title", this.name, this.chip.element, this.time, span("anb-space"), this.buttons),
      div("anb-sub", this.facts, this.why, this.notes),
    );
  }

  forget() {
    this.stopPressed = 0;
  }

  draw() {
    const { run, state, ranks, lineCount, lostAt, restarts } = this.store;
    const over = END_STATES.has(state.state);
    setText(this.name, run.name || "run");
    this.chip.set(lostAt !== null ? "not connected" : this.stopPressed && !over ? "stopping" : state.state);
    const size = ranks.size || run.size;
    const facts = [`${size} ${size === 1 ? "rank" : "ranks"}${deviceNames(ranks)}`, `${count(lineCount)} ${lineCount === 1 ? "line" : "lines"}`];
    if (restarts.length) facts.push(`restart ${restarts.at(-1)[0]} of ${restarts.at(-1)[1]}`);
    setText(this.facts, facts.join(" · "));
    setText(this.why, run.why);
    show(this.buttons, this.view.canAct && !over);
    show(this.pause, run.background);
    setText(this.pause, this.store.following ? "Pause" : "Resume");
    setText(this.stacks, this.store.stacksRequested ? "Asking…" : "Stacks");
    if (this.state !== null && this.state !== state.state) this.view.announce(`${run.name}: ${state.state}${state.detail ? `, ${state.detail}` : ""}`);
    this.state = state.state;
    this.drawClock();
  }

  /** What moves on though nothing comes. */
  drawClock() {
    setText(this.time, duration(elapsed(this.store)));
    this.drawNotes();
    this.drawStop();
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
    if (!following) notes.push("paused: press Resume to follow");
    setText(this.notes, notes.join(" · "));
  }

  pressStop() {
    if (this.stop.dataset.step === "kill") {
      this.view.sendRequest({ do: "kill" });
      setText(this.stop, "Killing…");
      this.stop.disabled = true;
      return;
    }
    this.view.sendRequest({ do: "stop" });
    this.view.announce("Stopping");
    this.stopPressed = performance.now();
    this.view.draw();
  }

  // A second press kills; for a second after the first one it waits, so that a double click does not.
  drawStop() {
    const over = END_STATES.has(this.store.state.state);
    show(this.stop, !over);
    if (over || this.stop.textContent === "Killing…") return;
    const requested = this.stopPressed > 0 || this.store.state.state === "stopping";
    const waits = requested && performance.now() - this.stopPressed < 1000 && this.stopPressed > 0;
    const hadFocus = document.activeElement === this.stop;
    setText(this.stop, !requested ? "Stop" : waits ? "Stopping…" : "Kill");
    set(this.stop, "data-step", requested && !waits ? "kill" : "stop");
    set(this.stop, "title", requested ? "End every process at once" : "End every rank at its next step");
    if (this.stop.disabled !== waits) this.stop.disabled = waits;
    if (hadFocus && !waits) this.stop.focus({ preventScroll: true });
  }

  pressPause() {
    this.store.following = !this.store.following;
    this.view.sendRequest({ do: "follow", on: this.store.following });
    this.view.announce(this.store.following ? "Following the run" : "The panel is paused");
    this.view.draw();
  }
}

/** " on cuda:0 … cuda:7", where devices are known. */
function deviceNames(ranks) {
  const names = [...new Set([...ranks.values()].flatMap((rankState) => [...rankState.devices.keys()]))];
  if (!names.length) return "";
  return names.length === 1 ? ` on ${names[0]}` : ` on ${names[0]} … ${names.at(-1)}`;
}
