// How far a rank is, and the whole run, from bars that stand inside of each other; and when it will be over.

import { count, duration, isKnown, number } from "./format.js";
import { END_STATES, kernelNow } from "./store.js";

/** The bars of a rank that move, outermost first. */
export const openBars = ({ bars }) => [...bars.values()].filter((bar) => !bar.closed);

/** How far a rank is: its newest open bar, and the one around it. */
export function progressOf(rankState) {
  const open = openBars(rankState);
  const bar = open.at(-1) ?? [...rankState.bars.values()].at(-1);
  return { bar, outer: open.length > 1 ? open.at(-2) : null };
}

export function progressText(bar, moving = true) {
  const parts = [`${count(bar.done)}${bar.ahead > bar.done ? `–${count(bar.ahead)}` : ""}${bar.total === null || bar.total === undefined ? ` ${bar.unit}` : `/${count(bar.total)}`}`];
  if (bar.rate) parts.push(rateText(bar));
  if (moving && bar.rate && bar.total && !bar.closed && bar.done < bar.total) parts.push(`${duration((bar.total - bar.done) / bar.rate)} left`);
  return parts.join(" · ");
}

/** 16.5 it/s, or 4.2 s/it. */
const rateText = ({ rate, unit }) => (rate >= 1 ? `${rate.toFixed(rate < 100 ? 1 : 0)} ${unit}/s` : `${(1 / rate).toFixed(1)} s/${unit}`);

export const shareOf = (bar) => (bar?.total ? Math.min(1, bar.done / bar.total) : bar?.closed ? 1 : 0);

const isBounded = (bar) => isKnown(bar.total) && bar.total > 0;

/** The part of the outermost bar that is done, the inner ones counted as parts of one unit of it; null where it has no total. */
export function shareDone(bars) {
  if (!bars.length || !isBounded(bars[0])) return null;
  const [bar, ...inner] = bars;
  return Math.min(1, (bar.done + (bar.done < bar.total ? (shareDone(inner) ?? 0) : 0)) / bar.total);
}

/** epoch 6/14: while something moves inside of it, the unit that is being done. */
export function labelOf(bar, isOuter) {
  const name = bar.label === "progress" ? "" : bar.label;
  if (!isBounded(bar)) return [name, count(bar.done), bar.unit].filter(Boolean).join(" ");
  const done = isOuter ? Math.min(bar.done + 1, bar.total) : bar.done;
  return [name, `${count(done)}/${count(bar.total)}`].filter(Boolean).join(" ");
}

const SILENT_AFTER = 8; // seconds
const SILENT_STEPS = 4; // and so many steps' time

/** Seconds that one unit of the outermost bar takes: by its own rate, or else by those inside of it; null where nothing says. */
function secondsOfUnit([bar, ...inner]) {
  if (bar.rate > 0) return 1 / bar.rate;
  if (!inner.length || !isBounded(inner[0])) return null;
  const unit = secondsOfUnit(inner);
  return unit === null ? null : unit * inner[0].total;
}

/** Seconds until the outermost bar is full; null where that can't be known. */
export function secondsLeft(bars) {
  const share = shareDone(bars);
  const unit = share === null ? null : secondsOfUnit(bars);
  return unit === null ? null : (1 - share) * bars[0].total * unit;
}

/** The bars of the rank that is furthest behind, outermost first, as far as they move. */
function slowest(store) {
  const open = [...store.ranks.values()]
    .filter((rankState) => !END_STATES.has(rankState.state))
    .map(openBars)
    .filter((bars) => bars.length);
  const shares = new Map(open.map((bars) => [bars, shareDone(bars) ?? 0]));
  return open.reduce((least, bars) => (shares.get(bars) < shares.get(least) ? bars : least), open[0] ?? []);
}

/** Bars with one around them whose place the label of the outermost says, such as "epoch 4 of 8", or "Epoch [4/8]". */
function withLabelled(bars) {
  const [, label, place, total] = /^(.*?)[\s:([]*(\d+) ?(?:\/|of) ?(\d+)/.exec(bars[0].label) ?? [];
  if (!(Number(total) > 1) || Number(place) > Number(total)) return bars;
  return [{ label, done: Math.max(0, place - 1), total: Number(total), rate: 0, unit: "it" }, ...bars];
}

/** The run's progress as short texts, and the share that is done with the seconds that are left, where they are known. */
export function runProgress(store) {
  const open = slowest(store);
  const silent = silence(store) > 0;
  if (!open.length) {
    const [epoch, seconds] = [lastOf(store, "epoch"), secondsOfStep(store)];
    const texts = [isKnown(epoch) ? `epoch ${number(epoch)}` : "", seconds > 0 && !silent ? `${number(1 / seconds)} steps/s` : ""].filter(Boolean);
    return { texts, share: null, left: null };
  }
  const bars = withLabelled(open);
  const [outer, inner] = [bars[0], bars.at(-1)];
  const [share, left] = [shareDone(bars), silent ? null : secondsLeft(bars)];
  const texts = [labelOf(outer, bars.length > 1)];
  if (share !== null) texts.push(`${Math.floor(share * 100)} %`);
  if (inner.rate > 0 && !silent) texts.push(rateText(inner));
  return { texts, share, left };
}

/** Seconds without a step of any rank, where that is long for this run; 0 otherwise. */
export function silence(store) {
  if (store.movedAt === null || store.state.state !== "running" || store.lostAt !== null) return 0;
  const seconds = kernelNow(store) - store.movedAt;
  const rates = slowest(store).map(({ rate }) => rate).filter((rate) => rate > 0);
  const step = Math.max(secondsOfStep(store) ?? 0, rates.length ? 1 / Math.max(...rates) : 0);
  return seconds >= Math.max(SILENT_AFTER, SILENT_STEPS * step) ? seconds : 0;
}

const lastOf = ({ metrics }, name) => metrics.get(name)?.values().next().value?.last?.[1];
const secondsOfStep = (store) => lastOf(store, "speed/step_time_s");

/** Ranks that are behind the others, each with how far: by a unit of the bar around others, or by a twentieth of a bar alone. */
export function stragglers(store) {
  const places = [...store.ranks.values()].flatMap((rankState) => {
    const bars = END_STATES.has(rankState.state) ? [] : openBars(rankState);
    const share = shareDone(bars);
    return share === null ? [] : [{ rank: rankState.rank, bar: bars[0], done: share * bars[0].total, least: bars.length > 1 ? 1 : Math.max(2, bars[0].total / 20) }];
  });
  const middle = places.map(({ done }) => done).sort((a, b) => a - b)[places.length >> 1];
  // bars of different lengths say nothing about each other
  if (places.length < 2 || new Set(places.map(({ bar }) => bar.total)).size > 1) return new Map();
  const late = places.filter(({ done, least }) => middle - done >= least);
  return new Map(late.map(({ rank, bar, done }) => [rank, `−${count(Math.floor(middle - done))} ${unitOf(bar, Math.floor(middle - done))}`]));
}

/** What a bar counts: its unit, or where that is tqdm's own, its label in the plural if that names something that is counted. */
function unitOf({ unit, label }, number) {
  if (unit !== "it" || !/^(epoch|step|iteration|round|fold|sample|image|file|trial)s?$/i.test(label)) return unit;
  return number === 1 || label.endsWith("s") ? label : `${label}s`;
}
