// Zooming a chart: by dragging over it, or by keys; all charts show the same part.

import { div, setStyle, show } from "./elements.js";

const LEAST_DRAG = 6; // pixels: less is a click

export class ChartZoom {
  constructor(chart) {
    this.chart = chart;
    this.from = null; // where a drag began, in pixels
    this.element = div("anb-zoomed");
    show(this.element, false);
  }

  begin(event) {
    const { scale } = this.chart;
    if (event.button !== 0 || !scale || scale.empty) return;
    this.from = this.to = event.offsetX;
    addEventListener("pointerup", () => this.end(), { once: true });
  }

  move(offset) {
    if (this.from === null) return;
    this.to = offset;
    const [left, right] = [Math.min(this.from, offset), Math.max(this.from, offset)];
    show(this.element, right - left >= LEAST_DRAG);
    setStyle(this.element, "left", `${left}px`);
    setStyle(this.element, "width", `${right - left}px`);
  }

  end() {
    const [from, to] = [Math.min(this.from, this.to), Math.max(this.from, this.to)];
    this.from = null;
    show(this.element, false);
    if (to - from >= LEAST_DRAG) this.chart.charts.setZoom([this.chart.placeAt(from), this.chart.placeAt(to)]);
  }

  /** Whether a key was one that zooms, around a place of the axis. */
  key({ key }, at) {
    const { from, to } = this.chart.scale;
    const factor = { "+": 0.25, "-": 1 }[key];
    if (key === "0") this.chart.charts.setZoom(null);
    else if (factor) this.chart.charts.setZoom([at - (to - from) * factor, at + (to - from) * factor]);
    return key === "0" || factor !== undefined;
  }
}
