// What a person should notice: restarts, a stop, the error.

import { div, h, setText, show } from "./elements.js";
import { failureView } from "./failure.js";

export class Notices {
  constructor(view) {
    this.view = view;
    this.store = view.store;
    this.shown = { failure: null, attempt: 0 };
    this.restarts = h("div", { class: "anb-restarts", role: "note", "aria-label": "Restarts" });
    this.stopped = h("div", { class: "anb-stopped", role: "note" });
    this.failure = div("anb-failure-place");
    const parts = [this.restarts, this.stopped, this.failure];
    for (const part of parts) show(part, false);
    this.element = div("anb-notices", ...parts);
  }

  draw() {
    const { failure } = this.store;
    this.drawRestarts();
    this.drawStopped();
    if (failure !== this.shown.failure) {
      this.shown.failure = failure;
      const announce = (text) => this.view.announce(text);
      show(this.failure, Boolean(failure));
      this.failure.replaceChildren(...(failure ? [failureView(failure, announce)] : []));
      if (failure) announce(`${failure.rank === null ? "The run" : `Rank ${failure.rank}`} failed: ${failure.type}: ${failure.message}`);
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
