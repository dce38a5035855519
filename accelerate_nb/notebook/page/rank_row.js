// A rank's row in the table of ranks.

import { div, h, setText, set, setStyle, show, span } from "./elements.js";
import { bytes, isKnown, number, ofBytes } from "./format.js";
import { chip, meter } from "./controls.js";
import { progressOf, progressText, shareOf } from "./progress.js";
import { END_STATES } from "./states.js";

/** A rank's row in the table of ranks. */
export class RankRow {
  constructor(rank, pick) {
    this.rank = rank;
    this.chip = chip();
    this.fill = div("anb-fill");
    this.label = span("anb-bar-label");
    this.text = span("anb-bar-text");
    this.bar = h(
      "div",
      { class: "anb-bar", role: "progressbar", "aria-label": `rank ${rank} progress`, "aria-valuemin": 0, "aria-valuemax": 100 },
      this.fill, this.label, this.text,
    );
    this.metrics = [];
    this.busy = meter(`rank ${rank} device utilisation`);
    this.memory = meter(`rank ${rank} device memory`);
    this.busyText = span("anb-num anb-busy");
    this.memoryText = span("anb-num");
    this.busy.element.classList.add("anb-busy");
    this.device = span("anb-device");
    this.name = h(
      "button",
      { type: "button", class: `anb-rank anb-rank-btn anb-r${rank % 8}`, onclick: pick, title: `show the output of rank ${rank}`, "aria-label": `rank ${rank}: show its output` },
      String(rank),
    );
    const cell = (name, ...inside) => h("div", { class: `anb-cell ${name}`, role: "cell" }, ...inside);
    this.metricsAt = cell("anb-device-cell", this.device, this.busy.element, this.busyText, this.memory.element, this.memoryText);
    this.element = h(
      "div",
      { class: "anb-row", role: "row" },
      h("div", { class: "anb-cell", role: "rowheader" }, this.name), cell("", this.chip.element), cell("anb-bar-cell", this.bar), this.metricsAt,
    );
  }

  draw(rankState, names) {
    this.chip.set(rankState.state);
    set(this.chip.element, "title", rankState.detail || rankState.state);
    this.drawBar(rankState);
    this.drawMetrics(rankState, names);
    this.drawDevice(rankState);
  }

  drawBar(rankState) {
    const { bar, outer } = progressOf(rankState);
    const share = shareOf(bar);
    this.bar.classList.toggle("anb-none", !bar);
    this.bar.classList.toggle("anb-endless", Boolean(bar && !bar.total && !bar.closed));
    const prefix = outer ? `${outer.label} ${progressText({ ...outer, rate: null })} · ` : "";
    setText(this.label, bar ? `${prefix}${[bar.label, bar.note].filter(Boolean).join(" · ")}` : rankState.detail);
    const text = bar ? progressText(bar, !END_STATES.has(rankState.state)) : "";
    setText(this.text, text);
    setStyle(this.fill, "transform", `scaleX(${share.toFixed(4)})`);
    set(this.bar, "aria-valuenow", Math.round(share * 100));
    set(this.bar, "aria-valuetext", bar ? `${bar.label} ${text}` : rankState.detail || rankState.state);
  }

  drawMetrics(rankState, names) {
    while (this.metrics.length < names.length) {
      const cell = h("div", { class: "anb-cell anb-num anb-metric", role: "cell" });
      this.metrics.push(cell);
      this.element.insertBefore(cell, this.metricsAt);
    }
    names.forEach((name, i) => {
      const value = rankState.newest.get(name);
      setText(this.metrics[i], number(value));
      set(this.metrics[i], "data-name", name);
      this.metrics[i].classList.toggle("anb-bad", value !== undefined && !Number.isFinite(value));
    });
  }

  drawDevice(rankState) {
    const device = rankState.devices.values().next().value;
    show(this.metricsAt, Boolean(device));
    if (!device) return;
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
  }
}
