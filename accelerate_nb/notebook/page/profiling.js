// The button that has ranks profile their next steps, and what becomes of it.

import { button, h, set, setText, show, span } from "./elements.js";

const STEPS = 10; // as in Run.profile

export class Profiling {
  constructor(view) {
    this.view = view;
    this.ranks = h("select", { class: "anb-select", "aria-label": "ranks to profile" });
    this.button = button("", `Profile ${STEPS} steps`, () => this.press(), { title: `Run torch's profiler on the next ${STEPS} optimizer steps; the run goes on` });
    this.controls = span("anb-profiling-controls", this.ranks, this.button);
    this.status = h("span", { class: "anb-profiling", role: "status" });
    this.element = null; // all of it stands among the tools of the ranks
    view.ranks.tools.append(span("anb-space"), this.status, this.controls);
  }

  draw() {
    const { ranks, state, profileRequested, profileError } = this.view.store;
    const runs = state.state === "running" && [...ranks.values()].some((rankState) => rankState.state === "running");
    show(this.controls, this.view.canAct && runs);
    this.drawRanks([...ranks.keys()]);
    const waits = [...ranks.values()].filter((rankState) => rankState.profiling && rankState.state === "running").map(({ rank }) => rank);
    const names = waits.length === ranks.size && waits.length > 1 ? "all ranks" : `${waits.length === 1 ? "rank" : "ranks"} ${waits.join(", ")}`;
    const going = waits.length ? `Profiling ${names}: the next ${ranks.get(waits[0]).profiling} steps…` : profileRequested ? "Requested a profile…" : "";
    setText(this.status, profileError || going);
    this.status.classList.toggle("anb-bad", profileError !== "");
    show(this.status, this.status.textContent !== "");
  }

  /** All of them, or one; of many ranks the first is chosen, since each writes a trace. */
  drawRanks(ranks) {
    show(this.ranks, ranks.length > 1);
    if (this.drawn === ranks.join()) return;
    this.drawn = ranks.join();
    const before = this.ranks.value;
    this.ranks.replaceChildren(h("option", { value: "all" }, "All ranks"), ...ranks.map((rank) => h("option", { value: rank }, `Rank ${rank}`)));
    this.ranks.value = before || (this.view.many ? String(ranks[0]) : "all");
  }

  press() {
    const { value } = this.ranks;
    Object.assign(this.view.store, { profileRequested: true, profileError: "" });
    this.view.sendRequest({ do: "profile", ranks: value === "all" ? null : [Number(value)] });
    this.view.draw();
  }
}
