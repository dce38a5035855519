// What a person should notice: restarts, no output for a while, a stop, the error, the stacks that were requested.

import { copyButton } from "./text_export.js";
import { button, div, h, setText, show, span } from "./elements.js";
import { failureView } from "./failure.js";
import { duration } from "./format.js";
import { stacksView } from "./stacks.js";

export class Notices {
  constructor(view) {
    this.view = view;
    this.store = view.store;
    this.shown = { failure: null, stacks: view.store.stacks, attempt: 0 };
    this.restarts = h("div", { class: "anb-restarts", role: "note", "aria-label": "Restarts" });
    this.stopped = h("div", { class: "anb-stopped", role: "note" });
    this.failure = div("anb-failure-place");
    const parts = [this.restarts, this.buildIdle(), this.stopped, this.failure, this.buildStacks()];
    for (const part of parts) show(part, false);
    this.element = div("anb-notices", ...parts);
  }

  buildIdle() {
    this.idleText = span("anb-idle-text");
    this.idleStacks = button("", "Stacks", () => this.view.requestStacks());
    this.idleWarning = h(
      "div",
      { class: "anb-idle", role: "region", "aria-label": "No output for a while" },
      h("span", { class: "anb-idle-mark", "aria-hidden": "true" }, "⚠"), this.idleText, this.idleStacks,
    );
    return this.idleWarning;
  }

  buildStacks() {
    this.stacksText = h("div", { class: "anb-stacks-text", tabindex: "0", role: "group", "aria-label": "stacks of every rank" });
    this.stacks = h(
      "div",
      { class: "anb-stacks", role: "region", "aria-label": "Stacks", onkeydown: (event) => event.key === "Escape" && this.closeStacks(event) },
      div(
        "anb-section-head",
        span("anb-caption", "Stacks of all ranks"), span("anb-space"),
        copyButton("Copy", () => this.store.stacks?.text ?? "", (text) => this.view.announce(text)),
        button("anb-plain-btn", "Close", (event) => this.closeStacks(event)),
      ),
      this.stacksText,
    );
    return this.stacks;
  }

  closeStacks(event) {
    event.stopPropagation();
    show(this.stacks, false);
    this.view.restoreStacksFocus();
  }

  draw() {
    const { idleWarning, failure, stacks } = this.store;
    show(this.idleWarning, Boolean(idleWarning));
    show(this.idleStacks, this.view.canAct);
    if (idleWarning) setText(this.idleText, idleWarning.text || `No output from any rank for ${duration(idleWarning.seconds)}.`);
    this.drawRestarts();
    this.drawStopped();
    if (failure !== this.shown.failure) {
      this.shown.failure = failure;
      const announce = (text) => this.view.announce(text);
      show(this.failure, Boolean(failure));
      this.failure.replaceChildren(...(failure ? [failureView(failure, announce)] : []));
      if (failure) announce(`${failure.rank === null ? "The run" : `Rank ${failure.rank}`} failed: ${failure.type}: ${failure.message}`);
    }
    if (stacks !== this.shown.stacks) {
      this.shown.stacks = stacks;
      show(this.stacks, Boolean(stacks));
      if (stacks) this.stacksText.replaceChildren(...stacksView(stacks.text));
      this.view.announce("The stacks have arrived");
    }
  }

  /** Why each former attempt ended. */
  drawRestarts() {
    const { restarts } = this.store;
    const attempt = restarts.at(-1)?.[0] ?? 0;
    show(this.restarts, attempt > 0);
    if (attempt === this.shown.attempt) return;
    this.shown.attempt = attempt;
    this.restarts.replaceChildren(...restarts.map(([, , text]) => div("anb-restart", text)));
    if (attempt) this.view.announce(restarts.at(-1)[2]);
  }

  /** That ranks end with an interrupt is what a stop does: no error. */
  drawStopped() {
    const { state, failure, gone } = this.store;
    const stopped = Boolean(gone) || (state.state === "stopped" && !failure);
    show(this.stopped, stopped);
    if (stopped) setText(this.stopped, `${state.state === "running" ? "▶" : "■"} ${gone || "Stopped by you. The ranks' output until then is below."}`);
  }
}
