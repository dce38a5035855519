// The knobs of a training: each an input whose value all ranks take over after the same step.

import { button, h, set, setText, show, span } from "./elements.js";
import { knobText } from "./chart_marks.js";
import { END_STATES } from "./states.js";

/** A knob's label, its input, and what became of the last change. */
class KnobRow {
  constructor(name, view) {
    this.name = name;
    this.view = view;
    this.asked = null; // the value that was sent, until it counts or is refused
    this.hint = h("span", { class: "anb-knob-hint" });
    this.input = h("input", { type: "text", inputmode: "decimal", class: "anb-search anb-knob-value", autocomplete: "off", "aria-label": `knob ${name}` });
    this.form = h("form", { class: "anb-knob" }, span("anb-knob-name", name), this.input, button("", "Set", null, { type: "submit", "aria-label": `Set knob ${name}` }), this.hint);
    this.form.addEventListener("submit", (event) => this.send(event));
  }

  send(event) {
    event.preventDefault();
    const text = this.input.value.trim();
    const value = Number(text);
    this.asked = text === "" || !Number.isFinite(value) ? text : value;
    this.view.store.knobErrors.delete(this.name);
    this.view.sendRequest({ do: "knob", name: this.name, value: this.asked });
    this.view.draw();
  }

  draw({ value, least, most }, error) {
    if (this.asked === value || error) {
      if (this.asked !== null) this.view.announce(error ?? `${this.name} is ${knobText(value)} on all ranks`, true);
      this.asked = null;
    }
    if (this.shown !== value && document.activeElement !== this.input) this.input.value = String((this.shown = value));
    const bounds = [least === null ? "" : `from ${knobText(least)}`, most === null ? "" : `to ${knobText(most)}`].filter(Boolean).join(" ");
    setText(this.hint, error ?? (this.asked === null ? [`now ${knobText(value)}`, bounds].filter(Boolean).join(", ") : "changes after a step that all ranks come to…"));
    set(this.input, "aria-invalid", Boolean(error));
    this.hint.classList.toggle("anb-bad", Boolean(error));
  }
}

/** All knobs, while the run can be acted on. */
export class Knobs {
  constructor(view) {
    this.view = view;
    this.rows = new Map();
    this.element = h("div", { class: "anb-knobs", role: "group", "aria-label": "Knobs" });
    show(this.element, false);
  }

  draw() {
    const { knobs, knobErrors, state } = this.view.store;
    show(this.element, knobs.size > 0 && this.view.canAct && !END_STATES.has(state.state));
    for (const [name, row] of this.rows) if (!knobs.has(name) && this.rows.delete(name)) row.form.remove();
    for (const [name, knob] of knobs) {
      if (!this.rows.has(name)) {
        this.rows.set(name, new KnobRow(name, this.view));
        this.element.append(this.rows.get(name).form);
      }
      this.rows.get(name).draw(knob, knobErrors.get(name));
    }
  }
}
