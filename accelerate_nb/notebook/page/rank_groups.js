// Ranks that say the same, as one row: neighbours in the same state, none of them behind the others.

import { isKnown } from "./format.js";
import { progressOf, shareDone } from "./progress.js";

const FEWEST = 5; // ranks that are worth folding

/** The ranks in their order, those that say the same together where they are many enough: `[[rankState, …], …]`. */
export function rankGroups(ranks, late, fewest = FEWEST) {
  const groups = [];
  let before = null;
  for (const rankState of ranks) {
    const alone = rankState.state === "failed" || late.has(rankState.rank);
    const key = alone ? rankState.rank : `${rankState.state} ${rankState.bars.size > 0}`;
    if (key === before) groups.at(-1).push(rankState);
    else groups.push([rankState]);
    before = key;
  }
  return groups.flatMap((group) => (group.length < fewest ? group.map((rankState) => [rankState]) : [group]));
}

/** A group as what a row shows of one rank: its slowest bar, the range of each metric, the means of steps and devices. */
export function merged(group) {
  const openBars = (rankState) => [...rankState.bars.values()].filter((bar) => !bar.closed);
  const shares = new Map(group.map((rankState) => [rankState, shareDone(openBars(rankState)) ?? 0]));
  const slowest = group.reduce((least, rankState) => (shares.get(rankState) < shares.get(least) ? rankState : least));
  const { bar } = progressOf(slowest);
  const same = group.map((rankState) => progressOf(rankState).bar).filter((other) => other && bar && other.label === bar.label && other.total === bar.total);
  const bars = new Map([...slowest.bars].map(([name, value]) => [name, value === bar ? { ...bar, ahead: Math.max(...same.map(({ done }) => done)) } : value]));
  return {
    ...slowest, detail: `${group.length} ranks`, coordinates: "", bars,
    spread: rangesOf(group), steps: meanSteps(group), memory: fullest(group), devices: meanDevice(group),
  };
}

/** name -> [least, most] of the newest values. */
function rangesOf(group) {
  const ranges = new Map();
  for (const { newest } of group) {
    for (const [name, value] of newest) {
      const [least, most] = ranges.get(name) ?? [value, value];
      ranges.set(name, [Math.min(least, value), Math.max(most, value)]);
    }
  }
  return ranges;
}

function meanSteps(group) {
  const known = group.map(({ steps }) => steps).filter(Boolean);
  return known.length ? known[0].map((_, i) => mean(known.map((steps) => steps[i]))) : null;
}

/** The memory of the rank that has most in use. */
function fullest(group) {
  const size = ({ memory }) => memory?.parts.reduce((sum, part) => sum + part, 0) ?? 0;
  return group.reduce((most, rankState) => (size(rankState) > size(most) ? rankState : most)).memory;
}

/** The devices of all ranks as one: how busy they are on average, and the fullest memory. */
function meanDevice(group) {
  const all = group.flatMap(({ devices }) => [...devices.values()]);
  if (!all.length) return new Map();
  const kinds = [...new Set(all.map(({ device }) => device.split(":")[0]))];
  const busy = all.map(({ utilisation }) => utilisation).filter(isKnown);
  const fullest = all.reduce((most, item) => ((item.used ?? 0) > (most.used ?? 0) ? item : most));
  const device = `${all.length} × ${kinds.join("/")}`;
  return new Map([[device, { ...fullest, device, utilisation: busy.length ? mean(busy) : null }]]);
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
