// The parts of a rank's steps as a strip, their legend, and in sentences what makes steps slow.

import { div, h, set, setStyle, show, span } from "./elements.js";

const PHASES = ["data", "forward", "backward", "communication", "optimizer", "idle"]; // as in reports/step_causes.py

export const milliseconds = (value) => (value >= 1000 ? `${(value / 1000).toPrecision(3)} s` : `${value.toPrecision(3)} ms`);

const MEMORY = ["weights", "gradients", "optimizer", "activations", "others"]; // as in reports/memory_parts.py

/** A strip whose parts are as wide as their shares; `fill` takes their sizes, what they add up to, and a text. */
function strip(label, names) {
  const parts = names.map((name) => span(`anb-phase anb-phase-${name}`));
  const element = h("div", { class: "anb-phases", role: "img" }, ...parts);
  return {
    element,
    fill(sizes, total, text) {
      parts.forEach((part, i) => setStyle(part, "flexGrow", (sizes[i] / total).toFixed(3)));
      set(element, "aria-label", `${label}: ${text}`);
      set(element, "title", text);
    },
  };
}

/** The strip of a step; `set` takes milliseconds of each phase. */
export function phaseStrip(label) {
  const { element, fill } = strip(label, PHASES);
  return {
    element,
    set(times) {
      const total = times.reduce((sum, time) => sum + time, 0) || 1;
      const found = PHASES.map((phase, i) => `${phase} ${Math.round((100 * times[i]) / total)} %`).filter((text) => !text.endsWith(" 0 %"));
      fill(times, total, `${milliseconds(total)} a step: ${found.join(", ")}`);
    },
  };
}

/** The strip of a rank's memory, of the whole device where that is known. */
export function memoryStrip(label) {
  const { element, fill } = strip(label, MEMORY);
  return { element, set: ({ parts, total, text }) => fill(parts, total || parts.reduce((sum, part) => sum + part, 0) || 1, text) };
}

const legend = (title, names) => div("anb-legend", span("", `${title}:`), ...names.map((name) => span("", span(`anb-phase anb-phase-${name}`), name)));

/** The legend of all strips, and the sentences. */
export class StepNotes {
  constructor() {
    this.legend = legend("step", PHASES);
    this.memory = legend("memory", MEMORY);
    this.causes = h("div", { class: "anb-causes", role: "group", "aria-label": "What makes steps slow" });
    for (const part of [this.legend, this.memory, this.causes]) show(part, false);
    this.element = div("anb-step-notes", this.legend, this.memory, this.causes);
  }

  draw({ ranks, causes }) {
    show(this.legend, [...ranks.values()].some((rankState) => rankState.steps));
    show(this.memory, [...ranks.values()].some((rankState) => rankState.memory));
    show(this.causes, causes.length > 0);
    if (this.shown === causes) return;
    this.shown = causes;
    this.causes.replaceChildren(...causes.map((cause) => div("anb-cause", h("span", { "aria-hidden": "true" }, "→ "), cause)));
  }
}
