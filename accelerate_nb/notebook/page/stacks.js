// What a live run shows of ranks that stand still: that there was no output for a while, and their stacks.

import { button, div, h, setText, show, span } from "./elements.js";
import { duration } from "./format.js";
import { copyButton } from "./text_export.js";

/** The ranks' stacks; those that are elsewhere than the others stand out. */
export function stackBlocks(text) {
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
    this.view.sendRequest({ do: "stacks" });
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
