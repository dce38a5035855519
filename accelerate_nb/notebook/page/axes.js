// What lies along the bottom of all charts (steps, time or epochs), and the names of the metrics that have one (events/metric_names.py).

import { clockSpan, marks, number } from "./format.js";

const AUTOMATIC_PREFIXES = ["speed/", "optimizer/", "memory/"];
const EPOCH = "epoch";
const SUMMED = new Set(["speed/samples_per_s", "speed/tokens_per_s"]);

/** Whether each rank reports its own part, so that all together have the sum. */
export const isSummed = (name) => SUMMED.has(name);

export const isAutomatic = (name) => name === EPOCH || AUTOMATIC_PREFIXES.some((prefix) => name.startsWith(prefix));

/** Names that have a chart: first what code logged, then what ranks report by themselves. */
export function inOrder(names) {
  const charted = [...names].filter((name) => name !== EPOCH);
  return [...charted.filter((name) => !isAutomatic(name)), ...charted.filter(isAutomatic)];
}

/** One such axis; a series has its points by step and by time, and epochs are read from the metric `epoch` at that time. */
export class Axis {
  constructor(kind, store) {
    this.kind = kind;
    this.store = store;
    this.epochs = kind === "epoch" ? epochsOf(store) : null;
  }

  /** The place of a point of this step and time. */
  at(step, time) {
    if (this.kind === "step") return step;
    return this.epochs ? interpolated(this.epochs.t, this.epochs.y, this.epochs.length, time) : time - (this.store.run.started ?? 0);
  }

  range(curve) {
    return [this.at(curve.from, curve.began), this.at(curve.to, curve.ended)];
  }

  /** The middle of a bucket. */
  middle(bucket) {
    return this.kind === "step" ? (bucket.from + bucket.to) / 2 : this.at(0, (bucket.began + bucket.ended) / 2);
  }

  /** The point of a series that is nearest, as `[place, value]`. */
  nearest(curve, place) {
    if (this.kind === "step") return curve.nearest(place);
    const { epochs } = this;
    const time = epochs ? interpolated(epochs.y, epochs.t, epochs.length, place) : place + (this.store.run.started ?? 0);
    const point = curve.nearestAt(time);
    return point && [this.at(0, point[0]), point[1]];
  }

  /** The place of a moment, among the points of a series where the axis has steps. */
  ofTime(curve, time) {
    return this.kind === "step" ? interpolated(curve.t, curve.x, curve.length, time) : this.at(0, time);
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
function interpolated(from, to, length, value) {
  let [low, high] = [0, length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= value) low = middle;
    else high = middle;
  }
  const width = from[high] - from[low];
  return width > 0 ? to[low] + ((value - from[low]) / width) * (to[high] - to[low]) : to[low];
}
