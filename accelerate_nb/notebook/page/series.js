// The points of a metric, what lies along the bottom of its chart, and what columns of pixels make of them.

import { clockSpan, count, marks, number, spans } from "./format.js";

// as in events/run_state.py
const AUTOMATIC_PREFIXES = ["speed/", "optimizer/", "memory/"];
const EPOCH = "epoch";

/** Metrics of which each rank reports its own part, so that all together have the sum. */
export const SUMMED = new Set(["speed/samples_per_s", "speed/tokens_per_s"]);

export const isAutomatic = (name) => name === EPOCH || AUTOMATIC_PREFIXES.some((prefix) => name.startsWith(prefix));

/** Names that have a chart: first what code logged, then what ranks report by themselves. */
export function inOrder(names) {
  const charted = [...names].filter((name) => name !== EPOCH);
  return [...charted.filter((name) => !isAutomatic(name)), ...charted.filter(isAutomatic)];
}

/** One such axis; a series has its points by step and by time, and epochs are read from the metric `epoch` at that time. */
export class Axis {
  constructor(kind, store) {
    Object.assign(this, { kind, store, epochs: kind === "epoch" ? epochsOf(store) : null });
  }

  /** The place of a point of this step and time. */
  at(step, time) {
    if (this.kind === "step") return step;
    return this.epochs ? interpolated(this.epochs.t, this.epochs.y, time) : time - (this.store.run.started ?? 0);
  }

  /** The point of a series that is nearest, as `[place, value]`. */
  nearest(curve, place) {
    if (this.kind === "step") return curve.nearest(place);
    const { epochs } = this;
    const time = epochs ? interpolated(epochs.y, epochs.t, place) : place + (this.store.run.started ?? 0);
    const point = curve.nearest(time, "t");
    return point && [this.at(0, point[0]), point[1]];
  }

  /** The place of a moment, among the points of a series where the axis has steps. */
  ofTime(curve, time) {
    return this.kind === "step" ? interpolated(curve.t, curve.x, time) : this.at(0, time);
  }

  /** The marks at two places. */
  marks(places) {
    return this.kind === "time" ? places.map(clockSpan) : marks(places);
  }

  text(value) {
    return this.kind === "time" ? `after ${clockSpan(value)}` : `${this.kind} ${number(value)}`;
  }
}

/** The epochs over time, of the rank that knows most; null where none does. */
export function epochsOf(store) {
  const curves = [...(store.metrics.get("epoch")?.values() ?? [])].sort((a, b) => b.length - a.length);
  return curves.length && curves[0].length > 1 ? curves[0] : null;
}

/** What `to` is where `from`, which rises, comes to a value; beyond its ends it goes on as between the last two. */
function interpolated(from, to, value) {
  const high = Math.min(lastUpTo(from, value) + 1, from.length - 1);
  const low = Math.max(high - 1, 0);
  const width = from[high] - from[low];
  return width > 0 ? to[low] + ((value - from[low]) / width) * (to[high] - to[low]) : to[low];
}

/** One metric of one rank: its points, and what is said of all that have come. */
export class Series {
  constructor() {
    Object.assign(this, { x: [], y: [], t: [], sorted: true, last: null }); // `t` is when each came, in seconds since 1970
    Object.assign(this, { pointCount: 0, notPositive: 0 });
    // the ends of its steps, of its times, and of the values that are finite
    Object.assign(this, { from: Infinity, to: -Infinity, began: Infinity, ended: -Infinity, least: Infinity, most: -Infinity });
    this.oddAt = null; // the newest value that is not finite: its step, itself, its time
    this.brokenAt = null; // step and time from which on none is finite
  }

  add(x, y, time = 0) {
    if (this.last !== null && x < this.last[0]) this.sorted = false;
    this.last = [x, y];
    this.began = Math.min(this.began, time);
    this.ended = Math.max(this.ended, time);
    this.from = Math.min(this.from, x);
    this.to = Math.max(this.to, x);
    this.x.push(x);
    this.y.push(y);
    this.t.push(time);
    this.pointCount++;
    if (Number.isFinite(y)) {
      this.brokenAt = null;
      this.least = Math.min(this.least, y);
      this.most = Math.max(this.most, y);
      if (y <= 0) this.notPositive++;
    } else {
      this.brokenAt ??= [x, time];
      this.oddAt = [x, y, time];
    }
  }

  get length() {
    return this.x.length;
  }

  /** Forgets two of four points: the least and the most of them stay, and what is drawn hardly changes. */
  thin() {
    let kept = 0;
    for (let i = 0; i < this.length; i += 4) {
      let [least, most] = [i, i];
      for (let j = i + 1; j < Math.min(i + 4, this.length); j++) {
        if (this.y[j] < this.y[least]) least = j;
        if (!(this.y[j] <= this.y[most])) most = j;
      }
      for (const from of new Set([Math.min(least, most), Math.max(least, most)])) {
        for (const values of [this.x, this.y, this.t]) values[kept] = values[from];
        kept++;
      }
    }
    for (const values of [this.x, this.y, this.t]) values.length = kept;
  }

  /** The point whose step (`x`) or time (`t`) is nearest, as `[step or time, y]`. */
  nearest(place, along = "x") {
    if (!this.length) return null;
    const places = this[along];
    const nearer = (best, at, i) => (Math.abs(at - place) <= Math.abs(places[best] - place) ? i : best);
    let best = lastUpTo(places, place);
    if (along === "x" && !this.sorted) best = places.reduce(nearer, 0);
    else if (places[best + 1] - place < place - places[best]) best++;
    // the newest is always known, also where points were thinned
    const newest = along === "t" ? this.ended : this.last[0];
    return Math.abs(newest - place) <= Math.abs(places[best] - place) ? [newest, this.last[1]] : [places[best], this.y[best]];
  }
}

/** The sum over ranks as one series: at each moment that all of them have reported, of each what it reported last until then. */
export class Total {
  constructor(size) {
    Object.assign(this, { size, line: new Series() });
    this.newest = new Map(); // rank -> [step, value]
    this.until = -Infinity; // when the last points came that are in the sum
  }

  /** The sum with what has come since the last call. */
  updated(ranks) {
    const until = Math.min(...[...ranks.values()].map((curve) => curve.ended));
    const due = [];
    for (const [rank, { length, x, y, t }] of ranks) {
      let i = length;
      while (i > 0 && t[i - 1] > this.until) i--;
      for (; i < length && t[i] <= until; i++) due.push([t[i], rank, x[i], y[i]]);
    }
    this.until = Math.max(this.until, until);
    for (const [time, rank, step, value] of due.sort((a, b) => a[0] - b[0])) {
      this.newest.set(rank, [step, value]);
      const known = [...this.newest.values()];
      if (known.length === ranks.size) this.line.add(Math.max(...known.map(([x]) => x)), known.reduce((sum, [, y]) => sum + y, 0), time);
    }
    return new Map([[0, this.line]]);
  }
}

/** The index of the last of values, which rise, that is not above this one; 0 where all are. */
export function lastUpTo(values, value) {
  let [low, high] = [0, values.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (values[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** A series in columns of pixels, with the nearest points out of sight (`before`, `after`); `place` is where along the axis a point stands. */
export function columns({ length, x, y, t }, from, to, width, logarithmic, place = (step) => step) {
  const found = new Array(width);
  const scale = to > from ? (width - 1) / (to - from) : 0;
  for (let i = 0; i < length; i++) {
    const value = y[i];
    if (!Number.isFinite(value) || (logarithmic && value <= 0)) continue;
    const at = scale ? Math.round((place(x[i], t[i]) - from) * scale) : width >> 1;
    if (at < 0) found.before = { at, mean: value };
    else if (at >= width) found.after ??= { at, mean: value };
    else {
      const column = (found[at] ??= { least: value, most: value, first: value, last: value, sum: 0, points: 0 });
      if (value < column.least) column.least = value;
      if (value > column.most) column.most = value;
      column.last = value;
      column.sum += value;
      column.points++;
    }
  }
  return found;
}

/** Mean, and the least and most of `[[rank, value]]`; what is not finite counts for nothing where something else is. */
export function spread(values) {
  const finite = values.filter(([, value]) => Number.isFinite(value));
  const use = finite.length ? finite : values;
  const mean = use.reduce((sum, [, value]) => sum + value, 0) / use.length;
  const least = use.reduce((a, b) => (b[1] < a[1] ? b : a), use[0]);
  const most = use.reduce((a, b) => (b[1] > a[1] ? b : a), use[0]);
  return { mean, least, most };
}

/** What a rank has in each column: between its points interpolated, after the last carried forward, nothing before the first. */
function filled(found) {
  const known = found.map(({ least, most, sum, points }, at) => ({ at, least, most, mean: sum / points, points })).filter(Boolean);
  const knots = [found.before, ...known, found.after].filter(Boolean);
  const all = [];
  knots.forEach((knot, i) => {
    all[knot.at] = knot;
    const next = knots[i + 1] ?? { ...knot, at: found.length };
    for (let x = Math.max(0, knot.at + 1); x < Math.min(next.at, found.length); x++) {
      const mean = knot.mean + ((x - knot.at) / (next.at - knot.at)) * (next.mean - knot.mean);
      all[x] = { least: mean, most: mean, mean, points: 0 };
    }
  });
  return all;
}

/** What the columns of several ranks make together: `[{x, least, most, mean, points}]`. */
export function bandOf(ranks) {
  const every = ranks.map(filled);
  const band = [];
  for (let x = 0; x < (ranks[0]?.length ?? 0); x++) {
    if (!ranks.some((columnsOfRank) => columnsOfRank[x])) continue;
    let [least, most, sum, points, rankCount] = [Infinity, -Infinity, 0, 0, 0];
    for (const columnsOfRank of every) {
      const value = columnsOfRank[x];
      if (!value) continue;
      least = Math.min(least, value.least);
      most = Math.max(most, value.most);
      sum += value.mean;
      points += value.points;
      rankCount++;
    }
    band.push({ x, least, most, mean: sum / rankCount, points: points / rankCount });
  }
  return band;
}

/** What all ranks have come to: their mean at the last step that each of them has. */
export function newestOf(series) {
  const all = [...series.values()].filter((curve) => curve.last);
  const step = Math.min(...all.map((curve) => curve.last[0]));
  const values = all.map((curve) => curve.nearest(step)[1]);
  const mean = values.reduce((total, value) => total + value, 0) / values.length;
  return { value: values.length ? mean : undefined, step: all.length ? step : 0 };
}

/** Where values are no numbers, in words: "NaN since step 60, on all ranks"; empty where all are finite. */
export function notFiniteText(series) {
  const broken = [...series].filter(([, { brokenAt }]) => brokenAt);
  const odd = broken.length ? broken : [...series].filter(([, { oddAt }]) => oddAt);
  if (!odd.length) return "";
  const steps = odd.map(([, { brokenAt, oddAt }]) => (brokenAt ?? oddAt)[0]);
  const where = broken.length ? `since step ${count(Math.min(...steps))}` : `until step ${count(Math.max(...steps))}`;
  const kinds = odd.map(([, { oddAt }]) => (Number.isNaN(oddAt[1]) ? "NaN" : "infinite"));
  const ranks = odd.length === series.size ? "all ranks" : `rank${odd.length > 1 ? "s" : ""} ${spans(odd.map(([rank]) => rank))}`;
  return `${kinds.every((kind) => kind === kinds[0]) ? kinds[0] : "not finite"} ${where}${series.size > 1 ? `, on ${ranks}` : ""}`;
}

/** The averages of `[{mean, points}]`, with the weight of what came before at each point; the first values are not drawn to zero. */
export function smoothed(values, weight) {
  let [average, share] = [0, 0];
  // of a series that was thinned a column has more points where they are new
  const kept = weight ** Math.max(1, values.reduce((sum, { points }) => sum + points, 0) / values.length);
  return values.map(({ mean }) => {
    if (!Number.isFinite(mean)) return share ? average / share : NaN;
    average = average * kept + mean * (1 - kept);
    share = share * kept + (1 - kept);
    return average / share;
  });
}
