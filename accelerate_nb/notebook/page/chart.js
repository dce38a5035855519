// One metric as a chart: a canvas with its scale, a crosshair, and the values where it stands.

import { bandOf, columns, newestOf, notFiniteText, spread } from "./curves.js";
import { nameInGroup } from "./chart_group.js";
import { ChartZoom } from "./chart_zoom.js";
import { button, div, h, setText, set, setStyle, show, span } from "./elements.js";
import { count, marks, number } from "./format.js";
import { knobChangesText, paintBroken, paintKnobChanges } from "./chart_marks.js";
import { logTicks, ticks } from "./scales.js";
import { smoothed } from "./smoothing.js";
import { savePicture } from "./text_export.js";

/** One metric: a canvas with its scale, a crosshair, and the values where it stands. */
export class Chart {
  constructor(name, charts) {
    this.name = name;
    this.charts = charts;
    this.logarithmic = false;
    this.visible = true;
    this.drawn = "";
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.value = span("anb-chart-value");
    this.how = span("anb-chart-how");
    this.note = span("anb-chart-note");
    this.cross = div("anb-cross");
    this.tip = div("anb-tip");
    this.log = button("anb-mini", "log", () => this.toggleLog(), { "aria-pressed": "false", "aria-label": `${name}: logarithmic scale` });
    this.size = button("anb-mini", "⤢", () => this.toggleSize(), { "aria-pressed": "false", "aria-label": `${name}: large`, title: "large" });
    this.png = button("anb-mini anb-only-large", "PNG", () => savePicture(this.name, this.canvas, this.charts.palette, this.charts.axis.kind, this.legend), { "aria-label": `${name}: save as PNG` });
    this.zoom = new ChartZoom(this);
    this.plot = h(
      "div",
      {
        class: "anb-plot", tabindex: "0", role: "img", "aria-roledescription": "chart",
        onpointermove: (event) => this.pointAt(event.offsetX), onpointerleave: () => this.charts.moveCross(null),
        onpointerdown: (event) => this.zoom.begin(event), ondblclick: () => this.charts.setZoom(null),
        onkeydown: (event) => this.key(event), onblur: () => this.charts.moveCross(null),
      },
      this.canvas,
      this.cross,
      this.zoom.element,
    );
    this.element = h(
      "div",
      { class: "anb-chart", role: "group", "aria-label": `metric ${name}` },
      // the heading of its group has the prefix
      div("anb-chart-head", h("span", { class: "anb-chart-name", title: name }, nameInGroup(name)), this.value, this.how, this.note, this.log, this.size, this.png),
      this.plot,
      this.tip,
    );
    show(this.cross, false);
    show(this.tip, false);
  }

  toggleLog() {
    this.logarithmic = !this.logarithmic;
    set(this.log, "aria-pressed", this.logarithmic);
    this.draw(true);
  }

  toggleSize() {
    const large = this.element.classList.toggle("anb-large");
    set(this.size, "aria-pressed", large);
    this.draw(true);
  }

  /** What the lines are: `[[colour, text], …]`. */
  get legend() {
    const { palette, lineNames } = this.charts;
    if (this.banded) return [[palette.accent, `mean and range of ${this.series.size} ranks`]];
    return [...this.series.keys()].map((rank) => [palette.ranks[rank % 8], lineNames?.[rank] ?? `rank ${rank}`]);
  }

  get series() {
    return this.charts.linesOf(this.name);
  }

  /** Whether it has come only once, so that there is no course to draw. */
  get isNumber() {
    return [...this.series.values()].every(({ pointCount }) => pointCount < 2);
  }

  /** Whether ranks are shown as one band rather than as a line each. */
  get banded() {
    return this.charts.band && this.series.size > 1;
  }

  range() {
    let [from, to, least, most] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const curve of this.series.values()) {
      const [begin, end] = this.charts.axis.range(curve);
      from = Math.min(from, begin);
      to = Math.max(to, end);
      least = Math.min(least, this.logarithmic ? curve.leastPositive : curve.least);
      most = Math.max(most, curve.most);
    }
    if (this.charts.zoom) [from, to, least, most] = [...this.charts.zoom, ...this.seenRange(...this.charts.zoom)];
    if (this.logarithmic && most <= 0) [least, most] = [NaN, NaN];
    return { from, to, ...this.padded(least, most) };
  }

  /** Least and most of the values between two places of the axis. */
  seenRange(from, to) {
    let [least, most] = [Infinity, -Infinity];
    for (const curve of this.series.values()) {
      for (const bucket of curve.buckets) {
        const place = this.charts.axis.middle(bucket);
        if (place < from || place > to) continue;
        least = Math.min(least, this.logarithmic ? bucket.leastPositive : bucket.least);
        most = Math.max(most, bucket.most);
      }
    }
    return [least, most];
  }

  padded(least, most) {
    if (!Number.isFinite(least) || !Number.isFinite(most)) return { least: 0, most: 1, empty: true };
    if (this.logarithmic) {
      const margin = least === most ? 2 : (most / least) ** 0.05;
      return { least: least / margin, most: most * margin };
    }
    const margin = most > least ? (most - least) * 0.06 : Math.abs(most) * 0.1 || 1;
    return { least: least - margin, most: most + margin };
  }

  draw(force = false) {
    this.paintChanges(force);
    this.drawValues();
  }

  drawValues() {
    this.head();
    if (this.charts.cross !== null) this.drawCross();
  }

  paintChanges(force = false) {
    if (force || !this.width) this.measure();
    const { width, height } = this;
    const state = [width, height, this.charts.band, this.charts.look, this.logarithmic, this.charts.palette.key, this.points(), this.charts.store.knobChanges.length].join();
    if (!width || (!force && state === this.drawn)) return;
    this.drawn = state;
    this.paint(width, height);
  }

  // The browser lays the page out anew when it is asked for a size after a change: asked only when it may be another.
  measure() {
    this.width = this.plot.clientWidth;
    this.height = this.plot.clientHeight;
  }

  points() {
    let total = 0;
    for (const curve of this.series.values()) total += curve.pointCount;
    return total;
  }

  head() {
    const { series } = this;
    const [{ value, step }, how] = [newestOf(series), this.charts.howOf(this.name)];
    if (this.charts.cross === null) this.writeValue(value, how);
    let [notPositive, least, most] = [0, Infinity, -Infinity];
    for (const curve of series.values()) {
      notPositive += curve.notPositive;
      least = Math.min(least, curve.least);
      most = Math.max(most, curve.most);
    }
    const notes = [];
    const notFinite = this.charts.lineNames ? "" : notFiniteText(series);
    if (notFinite) notes.push(`⚠ ${notFinite}`);
    if (this.logarithmic && notPositive) notes.push(`⚠ ${count(notPositive)} ≤ 0 not shown`);
    setText(this.note, notes.join(", "));
    set(this.note, "title", notes.join(", "));
    const label =
      `${this.name}: min ${number(least)}, max ${number(most)}, ` +
      `last ${this.charts.lineNames ? this.lastOfLines() : `${number(value)}${how ? ` (${how} ranks)` : ""}`}, up to step ${number(step)}${notFinite && `, ${notFinite}`}. Arrow keys read single steps, plus and minus zoom, 0 shows all.`;
    set(this.plot, "aria-label", label + knobChangesText(this.charts.store));
  }

  /** The value in the heading; of runs, which have no mean, there is none. */
  writeValue(value, how) {
    setText(this.value, this.charts.lineNames ? "" : number(value));
    setText(this.how, this.charts.lineNames ? "" : how);
  }

  lastOfLines() {
    return [...this.series].map(([rank, curve]) => `${this.charts.lineNames[rank]} ${number(curve.last?.[1])}`).join(", ");
  }

  paint(width, height) {
    const ratio = window.devicePixelRatio || 1;
    const size = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== size[0]) this.canvas.width = size[0];
    if (this.canvas.height !== size[1]) this.canvas.height = size[1];
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const range = this.range();
    const values = range.empty ? [] : this.logarithmic ? logTicks(range.least, range.most) : ticks(range.least, range.most);
    const scale = marks(values).map((text, i) => [values[i], text]);
    pen.font = `10px ${this.charts.palette.font}`;
    const gutter = Math.max(24, ...scale.map(([, text]) => pen.measureText(text).width + 8));
    const box = { left: Math.ceil(gutter), right: width - 6, top: 5, bottom: height - 15 };
    this.scale = { ...range, ...box, ...this.scales(range, box) };
    this.paintAxes(pen, scale);
    if (range.empty) return;
    paintBroken(pen, this.series, this.charts, this.scale);
    paintKnobChanges(pen, this.series.values().next().value, this.charts, this.scale);
    if (this.banded) this.paintBand(pen);
    else this.paintLines(pen);
  }

  scales({ from, to, least, most }, { left, right, top, bottom }) {
    const place = this.logarithmic
      ? (value) => bottom - ((Math.log(value) - Math.log(least)) / (Math.log(most) - Math.log(least))) * (bottom - top)
      : (value) => bottom - ((value - least) / (most - least)) * (bottom - top);
    const across = (x) => (to > from ? left + ((x - from) / (to - from)) * (right - left) : (left + right) / 2);
    return { place, across };
  }

  paintAxes(pen, scale) {
    const { left, right, bottom, place, from, to, empty } = this.scale;
    const { dim, grid } = this.charts.palette;
    pen.fillStyle = dim;
    pen.strokeStyle = grid;
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const [value, text] of scale) {
      const y = Math.round(place(value)) + 0.5;
      pen.beginPath();
      pen.moveTo(left, y);
      pen.lineTo(right, y);
      pen.stroke();
      pen.fillText(text, left - 4, y);
    }
    pen.textBaseline = "alphabetic";
    if (empty) {
      pen.textAlign = "center";
      pen.fillText(this.logarithmic ? "no value above 0" : "no finite value", (left + right) / 2, bottom / 2 + 8);
    }
    if (!Number.isFinite(from)) return;
    pen.textAlign = "left";
    const [first, last] = this.charts.axis.marks(to > from ? [from, to] : [from]);
    pen.fillText(first, left, bottom + 12);
    pen.textAlign = "right";
    if (last !== undefined && last !== first) pen.fillText(last, right, bottom + 12);
  }

  columnsOf(curve) {
    const { from, to, left, right } = this.scale;
    return columns(curve, from, to, Math.max(2, Math.floor(right - left) + 1), this.logarithmic, (bucket) => this.charts.axis.middle(bucket));
  }

  /** The lines of all ranks, the first on top; one that lies on another is dashed, so that both colours are seen. */
  paintLines(pen) {
    const painted = [];
    for (const [rank, curve] of [...this.series].reverse()) {
      const found = this.columnsOf(curve);
      const under = painted.filter((other) => this.isOn(other, found)).length;
      pen.setLineDash(under ? [6, 6 * under] : []);
      pen.lineDashOffset = -6 * under;
      this.paintLine(pen, found, this.charts.palette.ranks[rank % 8]);
      painted.push(found);
    }
    pen.setLineDash([]);
  }

  /** Whether two lines are hardly told apart, over most of their points. */
  isOn(a, b) {
    const apart = a.flatMap((column, x) => (column && b[x] ? [Math.abs(this.scale.place(column.last) - this.scale.place(b[x].last)) > 1] : []));
    return apart.length > 1 && apart.filter(Boolean).length < apart.length / 4;
  }

  paintLine(pen, found, colour) {
    const { left, place } = this.scale;
    if (this.charts.smoothing) {
      const kept = found.flatMap((column, x) => (column ? [{ x, mean: column.sum / column.points, points: column.points }] : []));
      this.paintSmoothed(pen, kept, colour);
      pen.globalAlpha = 0.25; // the values themselves
    }
    pen.strokeStyle = colour;
    pen.lineWidth = 1.4;
    pen.lineJoin = "round";
    pen.beginPath();
    let drawn = 0;
    found.forEach((column, x) => {
      if (!column) return;
      if (drawn++) pen.lineTo(left + x, place(column.first));
      else pen.moveTo(left + x, place(column.first));
      if (column.points > 1) {
        pen.lineTo(left + x, place(column.least));
        pen.lineTo(left + x, place(column.most));
        pen.lineTo(left + x, place(column.last));
      }
    });
    pen.stroke();
    pen.globalAlpha = 1;
    if (drawn === 1) this.dot(pen, found, colour);
  }

  paintSmoothed(pen, values, colour) {
    const { left, place } = this.scale;
    pen.strokeStyle = colour;
    pen.lineWidth = 1.8;
    pen.lineJoin = "round";
    pen.beginPath();
    smoothed(values, this.charts.smoothing).forEach((average, i) => {
      if (Number.isFinite(average) && !(this.logarithmic && average <= 0)) pen.lineTo(left + values[i].x, place(average));
    });
    pen.stroke();
  }

  dot(pen, found, colour) {
    const x = found.findIndex(Boolean);
    pen.fillStyle = colour;
    pen.beginPath();
    pen.arc(this.scale.left + x, this.scale.place(found[x].last), 2.5, 0, 7);
    pen.fill();
  }

  paintBand(pen) {
    const { left, place } = this.scale;
    const { accent } = this.charts.palette;
    const band = bandOf([...this.series.values()].map((curve) => this.columnsOf(curve)));
    pen.fillStyle = accent;
    pen.globalAlpha = 0.22;
    pen.beginPath();
    for (const { x, most } of band) pen.lineTo(left + x, place(most));
    for (const { x, least } of [...band].reverse()) pen.lineTo(left + x, place(least));
    pen.fill();
    pen.globalAlpha = 1;
    if (this.charts.smoothing) {
      this.paintSmoothed(pen, band, accent);
      pen.globalAlpha = 0.25;
    }
    pen.strokeStyle = accent;
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (const { x, mean } of band) pen.lineTo(left + x, place(mean));
    pen.stroke();
    pen.globalAlpha = 1;
  }

  /** The place along the axis of a point of the plot, in pixels from its left. */
  placeAt(offset) {
    const { left, right, from, to } = this.scale;
    return from + Math.min(1, Math.max(0, (offset - left) / (right - left))) * (to - from);
  }

  pointAt(offset) {
    if (!this.scale || this.scale.empty) return;
    this.zoom.move(offset);
    this.charts.moveCross(this.placeAt(offset), this);
  }

  key(event) {
    const { from, to } = this.scale ?? {};
    const first = this.series.values().next().value;
    if (!first || from === undefined) return;
    const { axis } = this.charts;
    const between = first.length > 1 ? Math.abs(axis.at(first.x[1], first.t[1]) - axis.at(first.x[0], first.t[0])) : 1;
    const stride = Math.max((to - from) / 100, between);
    const at = this.charts.cross ?? to;
    const goal = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: from, End: to }[event.key];
    if (event.key === "Escape" && this.charts.cross !== null) {
      event.stopPropagation();
      this.charts.moveCross(null);
    }
    if (this.zoom.key(event, at)) event.preventDefault();
    if (goal === undefined) return;
    event.preventDefault();
    this.charts.moveCross(Math.min(to, Math.max(from, goal)), this);
    this.charts.announce(this.reading(), true);
  }

  /** The nearest values of every rank: the place along the axis that they belong to, and `[[rank, value]]`. */
  values(x) {
    let step = null;
    const near = [];
    for (const [rank, curve] of this.series) {
      const point = this.charts.axis.nearest(curve, x);
      if (!point) continue;
      near.push([rank, ...point]);
      if (step === null || Math.abs(point[0] - x) < Math.abs(step - x)) step = point[0];
    }
    return { step, values: near.map(([rank, , value]) => [rank, value]) };
  }

  reading() {
    const { step, values } = this.values(this.charts.cross);
    if (!this.banded) return `${this.name}, ${this.charts.axis.text(step)}: ${values.map(([rank, value]) => `${this.charts.lineNames?.[rank] ?? (this.charts.isTotal(this.name) ? this.charts.howOf(this.name) : `rank ${rank}`)} ${number(value)}`).join(", ")}`;
    const { mean, least, most } = spread(values);
    return `${this.name}, ${this.charts.axis.text(step)}: mean ${number(mean)}, min ${number(least[1])} (rank ${least[0]}), max ${number(most[1])} (rank ${most[0]})`;
  }

  drawCross() {
    const { cross, pointed } = this.charts;
    const shown = cross !== null && this.scale && !this.scale.empty;
    show(this.cross, shown);
    show(this.tip, shown && pointed === this);
    if (!shown) {
      this.head();
      return;
    }
    const { step, values } = this.values(cross);
    if (step === null) return;
    const x = this.scale.across(step);
    setStyle(this.cross, "left", `${x}px`);
    this.writeValue(spread(values).mean, this.charts.howOf(this.name));
    if (pointed !== this) return;
    this.fillTip(step, values);
    this.tip.style.left = x > this.width / 2 ? "auto" : `${x + 14}px`;
    this.tip.style.right = x > this.width / 2 ? `${this.width - x + 14}px` : "auto";
  }

  fillTip(step, values) {
    const rows = [div("anb-tip-step", this.charts.axis.text(step))];
    if (this.banded || values.length > 12) {
      const { mean, least, most } = spread(values);
      rows.push(tipRow("mean", mean), tipRow(`min · rank ${least[0]}`, least[1]), tipRow(`max · rank ${most[0]}`, most[1]));
    } else for (const [rank, value] of values) rows.push(tipRow(this.charts.isTotal(this.name) ? this.charts.howOf(this.name) : span(`anb-rank anb-r${rank % 8}`, this.charts.lineNames?.[rank] ?? String(rank)), value));
    this.tip.replaceChildren(...rows);
  }
}

const tipRow = (label, value) => div("anb-tip-row", span("", label), span("anb-tip-value", number(value)));
