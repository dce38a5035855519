// A rank's row in the table of ranks.

import { div, h, setText, set, setStyle, show, span } from "./elements.js";
import { bytes, isKnown, number, ofBytes } from "./format.js";
import { chip, meter } from "./controls.js";
import { labelOf, progressOf, progressText, shareOf } from "./progress.js";
import { END_STATES } from "./states.js";
import { memoryStrip, phaseStrip } from "./step_phases.js";

/** A rank's row in the table of ranks. */
export class RankRow {
  /** `last` is the last of several ranks that share the row. */
  constructor(rank, pick, last = rank) {
    const folds = last > rank;
    const name = folds ? `ranks ${rank}–${last}` : `rank ${rank}`;
    this.chip = chip();
    this.fill = div("anb-fill");
    this.label = span("anb-bar-label");
    this.text = span("anb-bar-text");
    this.bar = h(
      "div",
      { class: "anb-bar", role: "progressbar", "aria-label": `${name} progress`, "aria-valuemin": 0, "aria-valuemax": 100 },
      this.fill, this.label, this.text,
    );
    this.metrics = [];
    this.busy = meter(`${name} device utilisation`);
    this.memory = meter(`${name} device memory`);
    this.busyText = span("anb-num anb-busy");
    this.memoryText = span("anb-num");
    this.busy.element.classList.add("anb-busy");
    this.device = span("anb-device");
    this.coordinates = span("anb-device anb-coordinates");
    this.name = h(
      "button",
      { type: "button", class: folds ? "anb-rank anb-rank-btn anb-ranks-btn" : `anb-rank anb-rank-btn anb-r${rank % 8}`, onclick: pick, title: folds ? "show each rank" : `show the output of ${name}`, "aria-label": folds ? `${name}: show each` : `${name}: show its output` },
      folds ? `${rank}–${last}` : String(rank),
    );
    const cell = (name, ...inside) => h("div", { class: `anb-cell ${name}`, role: "cell" }, ...inside);
    this.steps = phaseStrip(`${name} step`);
    this.parts = memoryStrip(`${name} memory`);
    this.stepsAt = cell("anb-steps-cell", this.steps.element, this.parts.element);
    this.deviceAt = cell("anb-device-cell", this.coordinates, this.device, this.busy.element, this.busyText, this.memory.element, this.memoryText);
    this.element = h(
      "div",
      { class: "anb-row", role: "row" },
      h("div", { class: "anb-cell", role: "rowheader" }, this.name), cell("", this.chip.element), cell("anb-bar-cell", this.bar), this.stepsAt, this.deviceAt,
    );
  }

  /** `late` says how far it is behind the others; a `silent` run has no speed. */
  draw(rankState, names, late = "", silent = false) {
    this.chip.set(rankState.state);
    set(this.chip.element, "title", rankState.detail || rankState.state);
    this.element.classList.toggle("anb-late", late !== "");
    this.drawBar(rankState, late, silent);
    this.drawMetrics(rankState, names);
    show(this.steps.element, Boolean(rankState.steps));
    if (rankState.steps) this.steps.set(rankState.steps);
    show(this.parts.element, Boolean(rankState.memory));
    if (rankState.memory) this.parts.set(rankState.memory);
    this.drawDevice(rankState);
  }

  drawBar(rankState, late, silent) {
    const { bar, outer } = progressOf(rankState);
    const share = shareOf(bar);
    this.bar.classList.toggle("anb-none", !bar);
    this.bar.classList.toggle("anb-endless", Boolean(bar && !bar.total && !bar.closed));
    const prefix = outer ? `${labelOf(outer, true)} · ` : "";
    // its process is in the tooltip of its state
    const detail = rankState.detail.startsWith("process ") ? "" : rankState.detail;
    setText(this.label, bar ? `${prefix}${[bar.label, bar.note].filter(Boolean).join(" · ")}` : detail);
    const text = bar ? progressText(silent ? { ...bar, rate: null } : bar, !END_STATES.has(rankState.state)) : "";
    setText(this.text, late ? `${late} · ${text}` : text);
    setStyle(this.fill, "transform", `scaleX(${share.toFixed(4)})`);
    set(this.bar, "aria-valuenow", Math.round(share * 100));
    set(this.bar, "aria-valuetext", bar ? `${bar.label} ${text}${late && `, ${late}`}` : detail || rankState.state);
  }

  drawMetrics(rankState, names) {
    while (this.metrics.length < names.length) {
      const cell = h("div", { class: "anb-cell anb-num anb-metric", role: "cell" });
      this.metrics.push(cell);
      this.element.insertBefore(cell, this.stepsAt);
    }
    names.forEach((name, i) => {
      const value = rankState.newest.get(name);
      const [least, most] = rankState.spread?.get(name) ?? [value, value];
      setText(this.metrics[i], number(least) === number(most) ? number(value) : `${number(least)}–${number(most)}`);
      set(this.metrics[i], "data-name", name);
      this.metrics[i].classList.toggle("anb-bad", value !== undefined && !Number.isFinite(value));
    });
  }

  drawDevice(rankState) {
    const device = rankState.devices.values().next().value;
    show(this.deviceAt, Boolean(device || rankState.coordinates));
    setText(this.coordinates, rankState.coordinates);
    show(this.coordinates, Boolean(rankState.coordinates));
    if (!device) return void set(this.deviceAt, "title", rankState.coordinates);
    setText(this.device, device.device + (rankState.devices.size > 1 ? ` +${rankState.devices.size - 1}` : ""));
    const [busy, used, total] = [device.utilisation, device.used, device.total];
    // what is not known yet keeps its place, so that nothing beside it moves
    this.busy.element.classList.toggle("anb-unknown", !isKnown(busy));
    setText(this.busyText, isKnown(busy) ? `${Math.round(busy)} %` : "");
    if (isKnown(busy)) this.busy.set(busy / 100, `${Math.round(busy)} %`, false); // a busy device is a good thing
    const memory = !isKnown(used) ? "" : total ? ofBytes(used, total) : bytes(used);
    show(this.memory.element, Boolean(total));
    setText(this.memoryText, total && used / total > 0.9 ? `⚠ ${memory}` : memory);
    if (total) this.memory.set(used / total, memory);
    set(this.deviceAt, "title", [rankState.coordinates && `place in the mesh: ${rankState.coordinates}`, this.device.textContent, this.busyText.textContent && `${this.busyText.textContent} busy`, this.memoryText.textContent].filter(Boolean).join("\n"));
  }
}
