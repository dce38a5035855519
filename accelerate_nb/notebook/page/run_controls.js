// What can be asked of a live run, as buttons in the panel's head, and its progress in the title of the browser's tab.

import { button, set, setText, show } from "./elements.js";
import { timeLeft } from "./format.js";
import { runProgress, silence, stragglers } from "./run_progress.js";
import { END_STATES } from "./states.js";
import { TabTitle } from "./tab_title.js";

export class RunControls {
  constructor(view) {
    this.view = view;
    this.store = view.store;
    this.element = null;
    this.tab = new TabTitle();
    this.stop = button("anb-stop", "Stop", () => this.pressStop());
    this.stacks = button("", "Stacks", () => view.requestStacks(), { title: "Show the current stack of every rank" });
    this.pause = button("", "Freeze view", () => this.pressFreeze(), { title: "Freeze this view; the run continues" });
    view.controls = this;
    view.progress = { runProgress, silence, stragglers }; // a run that is over has none
    view.head.buttons.append(this.pause, this.stacks, this.stop);
  }

  draw() {
    show(this.pause, this.store.run.background);
    setText(this.pause, this.store.following ? "Freeze view" : "Unfreeze view");
    setText(this.stacks, this.store.stacksRequested ? "Asking…" : "Stacks");
    this.drawClock();
  }

  /** Shows in the tab how far the run is, also while nobody looks at the page. */
  drawTab() {
    const { share, left } = runProgress(this.store);
    const isKnown = left !== null && !this.store.idleWarning;
    const over = END_STATES.has(this.store.state.state);
    const parts = over || share === null ? [] : [`${Math.floor(share * 100)} %`, ...(isKnown ? [`${timeLeft(left)} left`] : [])];
    this.tab.show(this.view.canAct ? parts.join(" · ") : "");
  }

  close() {
    this.tab.show("");
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
    this.view.stopPressed = performance.now();
    this.view.draw();
  }

  // A second press kills; for a second after the first one it waits, so that a double click does not.
  drawClock() {
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

  pressFreeze() {
    this.store.following = !this.store.following;
    this.view.sendRequest({ do: "follow", on: this.store.following });
    this.view.announce(this.store.following ? "Following the run" : "The view is frozen");
    this.view.draw();
  }
}
