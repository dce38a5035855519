// What a person should notice: restarts, a stop, the error that leads, and ranks that stand still with their stacks.

import { plain } from "./ansi.js";
import { button, copyButton, div, folded, h, setText, show, span } from "./elements.js";
import { duration } from "./format.js";

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
    const { failure, gone, restarts, state } = this.store;
    const attempt = restarts.at(-1)?.[0] ?? 0;
    show(this.restarts, attempt > 0);
    if (attempt !== this.shown.attempt) {
      this.shown.attempt = attempt;
      this.restarts.replaceChildren(...restarts.map(([, , text]) => div("anb-restart", text)));
      if (attempt) this.view.announce(restarts.at(-1)[2]);
    }
    // that ranks end with an interrupt is what a stop does: no error
    const stopped = Boolean(gone) || (state.state === "stopped" && !failure);
    show(this.stopped, stopped);
    if (stopped) setText(this.stopped, `${state.state === "running" ? "▶" : "■"} ${gone || "Stopped by you. The ranks' output until then is below."}`);
    if (failure !== this.shown.failure) {
      this.shown.failure = failure;
      const announce = (text) => this.view.announce(text);
      show(this.failure, Boolean(failure));
      this.failure.replaceChildren(...(failure ? [failureView(failure, announce)] : []));
      if (failure) announce(`${failure.rank === null ? "The run" : `Rank ${failure.rank}`} failed: ${failure.type}: ${failure.message}`);
    }
  }

}

/** The error that leads: its sentence, the person's own lines, what to do, and what the others said. */
function failureView(failure, announce) {
  const traceback = h("pre", { class: "anb-pre", tabindex: "0", role: "group", "aria-label": "traceback" }, plain(failure.traceback || ""));
  const ofRun = failure.rank === null; // its time was over, and no rank's fault
  const others = failure.others ?? [];
  const lines = failure.last_lines ?? [];
  return h(
    "div",
    { class: "anb-failure", role: "region", "aria-label": "The error" },
    div(
      "anb-failure-head",
      ofRun ? null : span(`anb-rank anb-r${failure.rank % 8}`, `rank ${failure.rank}`),
      span("anb-failure-type", failure.type),
      span("anb-failure-message", failure.message),
    ),
    failure.advice ? div("anb-advice", h("span", { class: "anb-advice-mark", "aria-hidden": "true" }, "→"), span("", failure.advice)) : null,
    ...frameRuns(failure.frames ?? []),
    lines.length ? div("anb-last", div("anb-caption", "Its last lines"), h("pre", { class: "anb-pre", tabindex: "0", role: "group", "aria-label": "last lines" }, lines.map(plain).join("\n"))) : null,
    others.length ? div("anb-others", div("anb-caption", "The other ranks"), ...others.map((text) => div("anb-other", text))) : null,
    failure.traceback ? folded(ofRun ? "Every rank's stack" : "Whole traceback", traceback, copyButton("Copy", () => plain(failure.traceback), announce)) : null,
  );
}

/** Own frames stand open; frames of others that follow each other are folded into one line. */
function frameRuns(frames) {
  const parts = [];
  let strange = [];
  const guilty = [...frames].reverse().find((frame) => frame[3]);
  const fold = () => {
    if (strange.length) parts.push(folded(`${strange.length} ${strange.length === 1 ? "call" : "calls"} in other code`, ...strange.map(frameView)));
    strange = [];
  };
  for (const frame of frames) {
    if (!frame[3]) strange.push(frame);
    else {
      fold();
      parts.push(frameView(frame));
      parts.at(-1).classList.toggle("anb-guilty", frame === guilty);
    }
  }
  fold();
  return parts;
}

function frameView([place, name, source, own]) {
  return div(
    own ? "anb-frame anb-own" : "anb-frame",
    div("anb-frame-place", span("anb-place", place), name ? span("anb-in", ` in ${name}`) : null),
    source ? h("code", { class: "anb-source" }, source) : null,
  );
}

/** The ranks' stacks; those that are elsewhere than the others stand out. */
function stackBlocks(text) {
  const blocks = [];
  for (const line of text.split("\n")) {
    if (/^rank \d+/.test(line) || !blocks.length) blocks.push({ odd: line.includes("◀"), lines: [] });
    blocks.at(-1).lines.push(line);
  }
  return blocks;
}

/** The warning, and the stacks that were requested. */
export class Stacks {
  constructor(view) {
    this.view = view;
    this.store = view.store;
    this.shown = view.store.stacks;
    view.requestStacks = () => this.request();
    this.idleText = span("anb-idle-text");
    this.idleButton = button("", "Stacks", () => this.request());
    this.idle = h("div", { class: "anb-idle", role: "region", "aria-label": "No output for a while" }, h("span", { class: "anb-idle-mark", "aria-hidden": "true" }, "⚠"), this.idleText, this.idleButton);
    this.text = h("div", { class: "anb-stacks-text", tabindex: "0", role: "group", "aria-label": "stacks of every rank" });
    this.stacks = h(
      "div",
      { class: "anb-stacks", role: "region", "aria-label": "Stacks", onkeydown: (event) => event.key === "Escape" && this.putAway(event) },
      div(
        "anb-section-head",
        span("anb-caption", "Stacks of all ranks"), span("anb-space"),
        copyButton("Copy", () => this.store.stacks?.text ?? "", (text) => view.announce(text)),
        button("anb-plain-btn", "Close", (event) => this.putAway(event)),
      ),
      this.text,
    );
    for (const part of [this.idle, this.stacks]) show(part, false);
    this.element = div("anb-notices", this.idle, this.stacks);
  }

  request() {
    this.store.stacksRequested = true;
    this.opener = document.activeElement;
    this.view.send({ do: "stacks" });
    this.view.announce("Requested the stacks of all ranks");
    this.view.draw();
  }

  /** Puts the stacks away; the keyboard goes back to where they were asked from. */
  putAway(event) {
    event.stopPropagation();
    show(this.stacks, false);
    (this.opener?.isConnected ? this.opener : this.view.controls.stacks).focus();
  }

  draw() {
    const { idleWarning, stacks } = this.store;
    show(this.idle, Boolean(idleWarning));
    show(this.idleButton, this.view.canAct);
    if (idleWarning) setText(this.idleText, idleWarning.text || `No output from any rank for ${duration(idleWarning.seconds)}.`);
    if (stacks === this.shown) return;
    this.shown = stacks;
    show(this.stacks, Boolean(stacks));
    if (stacks) this.text.replaceChildren(...stackBlocks(stacks.text).map(({ odd, lines }) => div(odd ? "anb-stack anb-odd" : "anb-stack", div("anb-stack-head", lines[0]), lines.length > 1 ? h("div", { class: "anb-stack-lines" }, lines.slice(1).join("\n")) : null)));
    this.view.announce("The stacks have arrived");
  }
}
