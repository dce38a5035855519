// What a person should notice: silence, that the run was stopped, its error, the stacks that were asked for.

import { copyButton } from "./copying.js";
import { button, div, h, say, show, span } from "./elements.js";
import { failureView } from "./failure.js";
import { duration } from "./format.js";
import { stacksView } from "./stacks.js";

export class Notices {
  constructor(view) {
    this.view = view;
    this.store = view.store;
    this.shown = { failure: null, stacks: view.store.stacks };
    this.stopped = h("div", { class: "anb-stopped", role: "note" });
    this.failure = div("anb-failure-place");
    const parts = [this.buildQuiet(), this.stopped, this.failure, this.buildStacks()];
    for (const one of parts) show(one, false);
    this.element = div("anb-notices", ...parts);
  }

  buildQuiet() {
    this.quietText = span("anb-quiet-text");
    this.quietStacks = button("", "Stacks", () => this.view.askStacks());
    this.quiet = h(
      "div",
      { class: "anb-quiet", role: "region", "aria-label": "No output for a while" },
      h("span", { class: "anb-quiet-mark", "aria-hidden": "true" }, "⚠"), this.quietText, this.quietStacks,
    );
    return this.quiet;
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
        button("anb-quiet-btn", "Close", (event) => this.closeStacks(event)),
      ),
      this.stacksText,
    );
    return this.stacks;
  }

  closeStacks(event) {
    event.stopPropagation();
    show(this.stacks, false);
    this.view.stacksAreClosed();
  }

  draw() {
    const { quiet, failure, stacks } = this.store;
    show(this.quiet, Boolean(quiet));
    show(this.quietStacks, this.view.canAct);
    if (quiet) say(this.quietText, quiet.text || `No output from any rank for ${duration(quiet.seconds)}.`);
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

  /** That ranks end with an interrupt is what a stop does: no error. */
  drawStopped() {
    const { state, failure, gone } = this.store;
    const stopped = Boolean(gone) || (state.state === "stopped" && !failure);
    show(this.stopped, stopped);
    if (stopped) say(this.stopped, `■ ${gone || "Stopped, as requested. The ranks' output until then is below."}`);
  }
}
