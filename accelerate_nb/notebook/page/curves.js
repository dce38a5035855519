// Series as columns of pixels, and the band that several ranks make together.

import { count, spans } from "./format.js";

const middleOf = (bucket) => (bucket.from + bucket.to) / 2;

/**
 * Least, most, first, last and mean of a series in each column of pixels; `middle` is where along the axis a bucket stands.
 * `before` and `after` are its nearest points out of sight.
 */
export function columns(series, from, to, width, logarithmic, middle = middleOf) {
  const found = new Array(width);
  const scale = to > from ? (width - 1) / (to - from) : 0;
  for (const bucket of series.buckets) {
    const points = logarithmic ? bucket.positive : bucket.finite;
    const column = to > from ? Math.round((middle(bucket) - from) * scale) : Math.floor(width / 2);
    if (!points) continue;
    if (column < 0 || column >= width) {
      if (column < 0 || !found.after) found[column < 0 ? "before" : "after"] = { at: column, mean: (logarithmic ? bucket.positiveSum : bucket.sum) / points };
      continue;
    }
    const summary = (found[column] ??= { least: Infinity, most: -Infinity, first: 0, last: 0, sum: 0, points: 0 });
    const least = logarithmic ? bucket.leastPositive : bucket.least;
    const usable = (value) => (logarithmic && value <= 0 ? least : value);
    if (!summary.points) summary.first = usable(bucket.first);
    summary.last = usable(bucket.last);
    summary.least = Math.min(summary.least, least);
    summary.most = Math.max(summary.most, bucket.most);
    summary.sum += logarithmic ? bucket.positiveSum : bucket.sum;
    summary.points += points;
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
  const odd = broken.length ? broken : [...series].filter(([, { notFinite }]) => notFinite);
  if (!odd.length) return "";
  const steps = odd.map(([, { brokenAt, oddAt }]) => (brokenAt ?? oddAt)[0]);
  const where = broken.length ? `since step ${count(Math.min(...steps))}` : `until step ${count(Math.max(...steps))}`;
  const kinds = odd.map(([, { last, brokenAt, oddAt }]) => (Number.isNaN((brokenAt ? last : oddAt)[1]) ? "NaN" : "infinite"));
  const ranks = odd.length === series.size ? "all ranks" : `rank${odd.length > 1 ? "s" : ""} ${spans(odd.map(([rank]) => rank))}`;
  return `${kinds.every((kind) => kind === kinds[0]) ? kinds[0] : "not finite"} ${where}${series.size > 1 ? `, on ${ranks}` : ""}`;
}
