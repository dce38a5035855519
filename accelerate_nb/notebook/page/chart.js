// One metric as a chart of uPlot, with the values where its crosshair stands, in words too.

import { button, div, h, saveFile, set, setText, show, span } from "./elements.js";
import { count, marks, number } from "./format.js";
import { bandOf, columns, newestOf, notFiniteText, smoothed, spread } from "./series.js";
import { uPlot } from "./uplot.js";

const LEAST_DRAG = 6; // pixels: less is a click
const ROUND = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

/** What stands before the first slash of a name, unless that is the one of a unit: "tokens/s". */
export const groupName = (name) => (name.includes("/") && !/^[^/]+\/(s|sec|second)$/.test(name) ? name.slice(0, name.indexOf("/")) : "");

/** The value of a knob as a person would give it. */
export const knobText = (value) => String(Number(value.toPrecision(6)));

export class Chart {
  constructor(name, charts) {
    Object.assign(this, { name, charts, logarithmic: false, visible: false, drawn: "" });
    this.plotted = null; // uPlot's chart, made anew where its lines or colours are others
    [this.value, this.how, this.note] = [span("anb-chart-value"), span("anb-chart-how"), span("anb-chart-note")];
    this.tip = h("div", { class: "anb-tip", hidden: true });
    const toggleLog = () => {
      this.logarithmic = !this.logarithmic;
      set(this.log, "aria-pressed", this.logarithmic);
      this.draw();
    };
    const toggleSize = () => set(this.size, "aria-pressed", this.element.classList.toggle("anb-large"));
    this.log = button("anb-mini", "log", toggleLog, { "aria-pressed": "false", "aria-label": `${name}: logarithmic scale` });
    this.size = button("anb-mini", "⤢", toggleSize, { "aria-pressed": "false", "aria-label": `${name}: large`, title: "large" });
    const png = button("anb-mini anb-only-large", "PNG", () => this.savePicture(), { "aria-label": `${name}: save as PNG` });
    this.plot = h("div", {
      class: "anb-plot", tabindex: "0", role: "img", "aria-roledescription": "chart",
      onkeydown: (event) => this.key(event), onblur: () => this.charts.moveCross(null),
    });
    this.element = h(
      "div",
      { class: "anb-chart", role: "group", "aria-label": `metric ${name}` },
      // the heading of its group has the prefix
      div("anb-chart-head", h("span", { class: "anb-chart-name", title: name }, name.slice(groupName(name) ? groupName(name).length + 1 : 0)), this.value, this.how, this.note, this.log, this.size, png),
      this.plot,
      this.tip,
    );
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

  lineName(rank, otherwise) {
    return this.charts.lineNames?.[rank] ?? (this.charts.isTotal(this.name) ? this.charts.howOf(this.name) : otherwise);
  }

  draw() {
    this.paintChanges();
    this.drawValues();
  }

  drawValues() {
    this.head();
    if (this.charts.cross !== null) this.drawCross();
  }

  paintChanges() {
    const { width, height, charts } = this;
    const points = [...this.series.values()].reduce((sum, { pointCount }) => sum + pointCount, 0);
    const state = [width, height, charts.band, charts.axis.kind, charts.zoom, charts.smoothing, this.logarithmic, charts.view.palette.key, points, charts.store.knobChanges.length].join();
    if (!width || this.isNumber || state === this.drawn) return;
    this.drawn = state;
    this.range = this.seenRange();
    const lines = this.banded ? this.band() : this.lines();
    const structure = [charts.view.palette.key, charts.axis.kind, this.logarithmic, this.banded, ...lines.map(({ label, dash = "" }) => `${label}${dash}`)].join();
    if (structure !== this.structure) {
      this.plotted?.destroy();
      this.plotted = new uPlot({ ...this.options(lines), width, height }, [[]], this.plot);
      this.structure = structure;
    }
    if (this.plotted.width !== width || this.plotted.height !== height) this.plotted.setSize({ width, height });
    this.plotted.setData([this.places, ...lines.map(({ values }) => values)]);
  }

  /** The part of the axis, and the least and most of the values in it. */
  seenRange() {
    const { axis, zoom } = this.charts;
    const ranges = [...this.series.values()].map((curve) => [axis.at(curve.from, curve.began), axis.at(curve.to, curve.ended)]);
    const [from, to] = zoom ?? [Math.min(...ranges.map(([begin]) => begin)), Math.max(...ranges.map(([, end]) => end))];
    let [least, most] = [Infinity, -Infinity];
    for (const { length, x, y, t } of this.series.values()) {
      for (let i = 0; i < length; i++) {
        const place = zoom ? axis.at(x[i], t[i]) : from;
        if (place < from || place > to || !Number.isFinite(y[i]) || (this.logarithmic && y[i] <= 0)) continue;
        least = Math.min(least, y[i]);
        most = Math.max(most, y[i]);
      }
    }
    if (!Number.isFinite(least) || !Number.isFinite(most)) return { from, to, least: 1, most: 10, empty: true };
    if (this.logarithmic) {
      const margin = least === most ? 2 : (most / least) ** 0.05;
      return { from, to, least: least / margin, most: most * margin };
    }
    // uPlot looks for ever for marks of what is rounding alone
    const margin = most - least > Math.abs(most) * 1e-12 ? (most - least) * 0.06 : Math.abs(most) * 0.1 || 1;
    return { from, to, least: least - margin, most: most + margin };
  }

  /** A series in columns of pixels: more points than these are never drawn. Each column has two places for its least and most. */
  columnsOf(curve) {
    const { from, to } = this.range;
    const { axis } = this.charts;
    const columnCount = Math.max(2, Math.floor(this.width - 40));
    const step = (to - from) / (columnCount - 1);
    this.places = Array.from({ length: 2 * columnCount }, (_, i) => (to > from ? from + (i * step) / 2 : from + (i - columnCount) * 1e-9));
    return columns(curve, from, to, columnCount, this.logarithmic, (step, time) => axis.at(step, time));
  }

  /** The lines of all ranks, the first on top; one that lies on another is dashed, so that both colours are seen. */
  lines() {
    const { view: { palette }, smoothing } = this.charts;
    const [found, painted] = [[], []];
    for (const [rank, curve] of [...this.series].reverse()) {
      const ofRank = Array.from(this.columnsOf(curve)); // without holes
      const under = painted.filter((other) => this.isOn(other, ofRank)).length;
      const values = ofRank.flatMap((column) => (!column ? [undefined, undefined] : column.points < 2 ? [column.first, undefined] : column.first > column.last ? [column.most, column.least] : [column.least, column.most]));
      found.push({ label: rank, values, stroke: palette.ranks[rank % 8], width: 1.4, dash: under ? [6, 6 * under] : undefined, alpha: smoothing ? 0.25 : 1 });
      if (smoothing) found.push({ ...this.smoothedLine(ofRank.map((column) => column && { ...column, mean: column.sum / column.points })), label: `${rank} smoothed`, stroke: palette.ranks[rank % 8] });
      painted.push(ofRank);
    }
    return found;
  }

  /** Whether two lines are hardly told apart, over most of their points. */
  isOn(a, b) {
    const pixel = (this.range.most - this.range.least) / this.height;
    const apart = a.flatMap((column, x) => (column && b[x] ? [Math.abs(column.last - b[x].last) > pixel] : []));
    return apart.length > 1 && apart.filter(Boolean).length < apart.length / 4;
  }

  band() {
    const { view: { palette }, smoothing } = this.charts;
    const all = [...this.series.values()].map((curve) => this.columnsOf(curve));
    const byColumn = new Array(this.places.length / 2).fill(undefined);
    for (const column of bandOf(all)) byColumn[column.x] = column;
    const line = (name) => byColumn.flatMap((column) => [column?.[name], undefined]);
    const edge = { stroke: "transparent", width: 0 };
    return [
      { label: "least", values: line("least"), ...edge }, { label: "most", values: line("most"), ...edge },
      { label: "mean", values: line("mean"), stroke: palette.accent, width: 1.5, alpha: smoothing ? 0.25 : 1 },
      ...(smoothing ? [{ ...this.smoothedLine(byColumn), label: "smoothed", stroke: palette.accent }] : []),
    ];
  }

  smoothedLine(byColumn) {
    const averages = smoothed(byColumn.filter(Boolean), this.charts.smoothing);
    let at = 0;
    const values = byColumn.flatMap((column) => {
      const average = column ? averages[at++] : undefined;
      return [Number.isFinite(average) && !(this.logarithmic && average <= 0) ? average : undefined, undefined];
    });
    return { values, width: 1.8 };
  }

  options(lines) {
    const { view: { palette }, axis } = this.charts;
    const text = { stroke: palette.dim, font: `10px ${palette.font}`, ticks: { show: false }, grid: { stroke: palette.grid, width: 1 } };
    const increments = { step: ROUND, time: CLOCK }[axis.kind];
    return {
      legend: { show: false },
      padding: [5, 12, 0, 0],
      series: [{}, ...lines.map(({ values, ...line }) => ({ ...line, spanGaps: true, points: { show: (_, i) => this.plotted?.data[i].filter((value) => value !== undefined).length === 1, size: 5, fill: line.stroke } }))],
      bands: this.banded ? [{ series: [2, 1], fill: palette.band }] : [],
      scales: {
        x: { time: false, range: () => (this.range.to > this.range.from ? [this.range.from, this.range.to] : [this.range.from - 1, this.range.from + 1]) },
        y: { distr: this.logarithmic ? 3 : 1, range: () => [this.range.least, this.range.most] },
      },
      axes: [
        { ...text, grid: { show: false }, size: 15, gap: 2, space: 70, ...(increments && { incrs: increments }), values: (_, splits) => axis.marks(splits) },
        { ...text, gap: 3, space: 22, size: (plotted, texts) => this.gutter(plotted, texts), values: (_, splits) => this.scaleMarks(splits) },
      ],
      cursor: {
        y: false, points: { show: false }, drag: { x: true, y: false, setScale: false, dist: LEAST_DRAG },
        move: (plotted, left, top) => [this.snapped(plotted, left), top],
        bind: { dblclick: () => () => this.charts.setZoom(null) },
      },
      hooks: {
        drawClear: [(plotted) => this.paintMarks(plotted)],
        setCursor: [({ cursor, posToVal }) => cursor.event && this.charts.moveCross(cursor.left < 0 ? null : posToVal(cursor.left, "x"), this)],
        setSelect: [(plotted) => this.select(plotted)],
      },
    };
  }

  /** The texts of places of the scale; one of powers begins at a place that is none. */
  scaleMarks(splits) {
    const isRound = (value) => value !== null && !this.range.empty && !(this.logarithmic && Math.abs(value / Number(value.toPrecision(1)) - 1) > 1e-6);
    const texts = marks(splits.filter(isRound));
    return splits.map((value) => (isRound(value) ? texts.shift() : ""));
  }

  /** The room of the texts at the left. */
  gutter(plotted, texts) {
    plotted.ctx.font = plotted.axes[1].font[0];
    return Math.max(24, ...(texts ?? []).map((text) => plotted.ctx.measureText(text).width / devicePixelRatio + 8));
  }

  /** Behind the lines: where values are no numbers, and where knobs were changed. */
  paintMarks(plotted) {
    const { ctx: pen, bbox: { left, top, width, height } } = plotted;
    const { axis, view: { palette }, store } = this.charts;
    const across = (place) => plotted.valToPos(place, "x", true);
    const isSeen = (x) => x >= left && x <= left + width;
    pen.save();
    pen.font = plotted.axes[0].font[0];
    pen.fillStyle = pen.strokeStyle = palette.dim;
    pen.textAlign = "center";
    if (this.range.empty) pen.fillText(this.logarithmic ? "no value above 0" : "no finite value", left + width / 2, top + height / 2);
    pen.setLineDash([3, 3]);
    const first = this.series.values().next().value;
    for (const [name, value, time] of store.knobChanges) {
      const x = Math.round(across(axis.ofTime(first, time))) + 0.5;
      if (!isSeen(x)) continue;
      pen.beginPath();
      pen.moveTo(x, top);
      pen.lineTo(x, top + height);
      pen.stroke();
      pen.textAlign = x > left + width / 2 ? "right" : "left";
      pen.fillText(`${name} ${knobText(value)}`, x + (pen.textAlign === "left" ? 3 : -3), top + 8 * devicePixelRatio);
    }
    const odd = [...this.series.values()].filter(({ oddAt }) => oddAt);
    const broken = odd.filter(({ brokenAt }) => brokenAt);
    const places = broken.length ? broken.map(({ brokenAt: [step, time] }) => axis.at(step, time)) : odd.map(({ oddAt: [step, , time] }) => axis.at(step, time));
    pen.fillStyle = palette.bad;
    for (const x of places.map(across)) if (isSeen(x)) pen.fillRect(Math.min(x, left + width - 2), top, devicePixelRatio, height);
    if (broken.length) {
      const x = Math.max(left, across(Math.min(...places)));
      pen.globalAlpha = 0.2;
      pen.fillRect(x, top, Math.max(0, left + width - x), height);
    }
    pen.restore();
  }

  head() {
    const { series } = this;
    const [{ value, step }, how] = [newestOf(series), this.charts.howOf(this.name)];
    if (this.charts.cross === null) this.writeValue(value, how);
    const curves = [...series.values()];
    const notPositive = curves.reduce((sum, curve) => sum + curve.notPositive, 0);
    const [least, most] = [Math.min(...curves.map((curve) => curve.least)), Math.max(...curves.map((curve) => curve.most))];
    const notes = [];
    const notFinite = this.charts.lineNames ? "" : notFiniteText(series);
    if (notFinite) notes.push(`⚠ ${notFinite}`);
    if (this.logarithmic && notPositive) notes.push(`⚠ ${count(notPositive)} ≤ 0 not shown`);
    setText(this.note, notes.join(", "));
    set(this.note, "title", notes.join(", "));
    const last = this.charts.lineNames ? [...series].map(([rank, curve]) => `${this.charts.lineNames[rank]} ${number(curve.last?.[1])}`).join(", ") : `${number(value)}${how ? ` (${how} ranks)` : ""}`;
    const changes = this.charts.store.knobChanges.slice(-3).map(([name, changed]) => ` Knob ${name} changed to ${knobText(changed)}.`);
    set(this.plot, "aria-label", `${this.name}: min ${number(least)}, max ${number(most)}, last ${last}, up to step ${number(step)}${notFinite && `, ${notFinite}`}. Arrow keys read single steps, plus and minus zoom, 0 shows all.${changes.join("")}`);
  }

  /** The value in the heading; of runs, which have no mean, there is none. */
  writeValue(value, how) {
    setText(this.value, this.charts.lineNames ? "" : number(value));
    setText(this.how, this.charts.lineNames ? "" : how);
  }

  /** The nearest values of every rank: the place along the axis that they belong to, and `[[rank, value]]`. */
  values(x) {
    const near = [...this.series].map(([rank, curve]) => [rank, this.charts.axis.nearest(curve, x)]).filter(([, point]) => point);
    const step = near.reduce((best, [, [at]]) => (best === null || Math.abs(at - x) < Math.abs(best - x) ? at : best), null);
    return { step, values: near.map(([rank, [, value]]) => [rank, value]) };
  }

  /** The crosshair stands where values are. */
  snapped(plotted, left) {
    if (left < 0 || this.range.empty) return left;
    const { step } = this.values(plotted.posToVal(left, "x"));
    return step === null ? left : Math.max(0, plotted.valToPos(step, "x"));
  }

  select(plotted) {
    const { left, width } = plotted.select;
    if (width < LEAST_DRAG) return;
    plotted.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.charts.setZoom([plotted.posToVal(left, "x"), plotted.posToVal(left + width, "x")]);
  }

  key(event) {
    const first = this.series.values().next().value;
    if (!first || !this.range) return;
    const { from, to } = this.range;
    const { axis } = this.charts;
    const between = first.length > 1 ? Math.abs(axis.at(first.x[1], first.t[1]) - axis.at(first.x[0], first.t[0])) : 1;
    const stride = Math.max((to - from) / 100, between);
    const at = this.charts.cross ?? to;
    const goal = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: from, End: to }[event.key];
    const factor = { "+": 0.25, "-": 1 }[event.key];
    if (event.key === "Escape" && this.charts.cross !== null) {
      event.stopPropagation();
      this.charts.moveCross(null);
    }
    if (goal === undefined && factor === undefined && event.key !== "0") return;
    event.preventDefault();
    if (event.key === "0") this.charts.setZoom(null);
    else if (factor) this.charts.setZoom([at - (to - from) * factor, at + (to - from) * factor]);
    else {
      this.charts.moveCross(Math.min(to, Math.max(from, goal)), this);
      this.charts.view.announce(this.reading());
    }
  }

  reading() {
    const { step, values } = this.values(this.charts.cross);
    const place = `${this.name}, ${this.charts.axis.text(step)}`;
    if (!this.banded) return `${place}: ${values.map(([rank, value]) => `${this.lineName(rank, `rank ${rank}`)} ${number(value)}`).join(", ")}`;
    const { mean, least, most } = spread(values);
    return `${place}: mean ${number(mean)}, min ${number(least[1])} (rank ${least[0]}), max ${number(most[1])} (rank ${most[0]})`;
  }

  drawCross() {
    const { cross, pointed } = this.charts;
    const shown = cross !== null && this.plotted && !this.range.empty;
    show(this.tip, shown && pointed === this);
    if (!shown) {
      this.plotted?.setCursor({ left: -10, top: -10 }, false);
      return void this.head();
    }
    const { step, values } = this.values(cross);
    if (step === null) return;
    const { plotted } = this;
    plotted.setCursor({ left: plotted.valToPos(step, "x"), top: 1 }, false);
    this.writeValue(spread(values).mean, this.charts.howOf(this.name));
    if (pointed !== this) return;
    const row = (label, value) => div("anb-tip-row", span("", label), span("anb-tip-value", number(value)));
    const rows = [div("anb-tip-step", this.charts.axis.text(step))];
    if (this.banded || values.length > 12) {
      const { mean, least, most } = spread(values);
      rows.push(row("mean", mean), row(`min · rank ${least[0]}`, least[1]), row(`max · rank ${most[0]}`, most[1]));
    } else for (const [rank, value] of values) rows.push(row(this.charts.isTotal(this.name) ? this.charts.howOf(this.name) : span(`anb-rank anb-r${rank % 8}`, this.lineName(rank, String(rank))), value));
    this.tip.replaceChildren(...rows);
    const x = plotted.over.offsetLeft + plotted.cursor.left;
    this.tip.style.left = x > this.width / 2 ? "auto" : `${x + 14}px`;
    this.tip.style.right = x > this.width / 2 ? `${this.width - x + 14}px` : "auto";
  }

  /** Saves the canvas as a picture with its title, the name of its axis and a legend, on the ground that it has in the panel. */
  savePicture() {
    const { ground, dim, font, accent, ranks } = this.charts.view.palette;
    const { canvas } = this.plotted.ctx;
    const [width, under] = [canvas.width / devicePixelRatio, canvas.height / devicePixelRatio + 26];
    const ofRanks = [...this.series.keys()].map((rank) => [ranks[rank % 8], this.lineName(rank, `rank ${rank}`)]);
    const legend = this.banded ? [[accent, `mean and range of ${this.series.size} ranks`]] : ofRanks;
    const inRow = legend.length > 1 ? Math.max(1, Math.floor(width / 80)) : 1;
    const whole = Object.assign(document.createElement("canvas"), { width: canvas.width, height: (under + 20 + 16 * Math.ceil(legend.length / inRow)) * devicePixelRatio });
    const pen = whole.getContext("2d");
    pen.fillStyle = ground;
    pen.fillRect(0, 0, whole.width, whole.height);
    pen.drawImage(canvas, 0, 26 * devicePixelRatio);
    pen.scale(devicePixelRatio, devicePixelRatio);
    const write = (text, x, y, size = 11) => Object.assign(pen, { fillStyle: dim, font: `${size}px ${font}` }).fillText(text, x, y);
    write(this.name, 8, 18, 14);
    write(this.charts.axis.kind, width / 2, under - 3);
    legend.forEach(([colour, text], i) => {
      const [x, y] = [8 + (i % inRow) * 80, under + 16 + 16 * Math.floor(i / inRow)];
      pen.fillStyle = colour;
      pen.fillRect(x, y - 6, 14, 4);
      write(text, x + 20, y);
    });
    whole.toBlob((blob) => saveFile(`${this.name.replace(/[^\w.-]+/g, "_")}.png`, blob));
  }
}
