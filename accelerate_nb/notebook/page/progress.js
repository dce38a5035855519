// How far a rank is.

import { count, duration, isKnown } from "./format.js";

/** How far a rank is: its newest open bar, and the one around it. */
export function progressOf(rankState) {
  const bars = [...rankState.bars.values()];
  const open = bars.filter((bar) => !bar.closed);
  const bar = open.at(-1) ?? bars.at(-1);
  return { bar, outer: open.length > 1 ? open.at(-2) : null };
}

export function progressText(bar, moving = true) {
  const parts = [`${count(bar.done)}${bar.ahead > bar.done ? `–${count(bar.ahead)}` : ""}${bar.total === null || bar.total === undefined ? ` ${bar.unit}` : `/${count(bar.total)}`}`];
  if (bar.rate) parts.push(rateText(bar));
  if (moving && bar.rate && bar.total && !bar.closed && bar.done < bar.total) parts.push(`${duration((bar.total - bar.done) / bar.rate)} left`);
  return parts.join(" · ");
}

/** 16.5 it/s, or 4.2 s/it. */
export const rateText = ({ rate, unit }) => (rate >= 1 ? `${rate.toFixed(rate < 100 ? 1 : 0)} ${unit}/s` : `${(1 / rate).toFixed(1)} s/${unit}`);

export const shareOf = (bar) => (bar?.total ? Math.min(1, bar.done / bar.total) : bar?.closed ? 1 : 0);

export const isBounded = (bar) => isKnown(bar.total) && bar.total > 0;

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
