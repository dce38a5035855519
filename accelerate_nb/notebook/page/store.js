// The facts of one run, from its messages: bounded, whatever comes; and how far it is, with the time when it will be over.

import { count, duration, isKnown, number, real, spans } from "./format.js";
import { Series } from "./series.js";

export const SYMBOLS = { starting: "○", running: "▶", finished: "✓", failed: "✕", stopped: "■", stopping: "◼" };
export const END_STATES = new Set(["finished", "failed", "stopped"]);

const MOST_LINES = 50_000; // kept of all ranks together
const MOST_LINES_OF_A_RANK = 20_000;
const MOST_OPEN_LINES = 8; // ranks whose open lines stand under the lines of all
const LONGEST_LINE = 10_000; // characters of a line that are kept; the whole of it is in the file
const MOST_POINTS = 400_000; // of all charts together; beyond, the longest series are thinned

function emptyContent() {
  return {
    run: { name: "", why: "", folder: "", started: null, size: 0, host: "", background: false, can_act: false, attach: "" },
    state: { state: "starting", detail: "", ended: null },
    ranks: new Map(), // rank -> what is known of it
    nodes: [], // of a run on several of them, in order: number, label, and the first and last of their ranks
    loads: new Map(), // number of a node -> how busy it is, and its memory
    metrics: new Map(), // name -> rank -> Series
    host: [],
    all: new RingBuffer(MOST_LINES),
    lineCount: 0,
    skipped: 0,
    points: 0,
    restarts: [], // [attempt, most restarts, text, ranks where they are others than before], the newest last
    precision: "",
    knobs: new Map(), // name -> value, least, most
    knobChanges: [], // [name, value, time], the newest last
    knobErrors: new Map(), // name -> why its last change was refused
    profileError: "", // why a profile, or a trace, was refused
    causes: [], // what makes steps slow, in sentences
    failure: null,
    idleWarning: null,
    movedAt: null, // when some rank last made a step, or moved a bar, in the kernel's seconds since 1970
    gone: "", // what ended the kernel, and the run with it
  };
}

/** What one model knows; its views read it. `epoch` grows when everything was forgotten. */
export function makeStore() {
  return {
    ...emptyContent(),
    epoch: 0, changes: 0, seq: 0, gaps: 0, clock: null, lastMessageAt: 0, stacks: null, stacksRequested: false, profileRequested: false, following: true, lostAt: null,
    views: new Set(), acknowledged: 0, acknowledgedAt: 0,
  };
}

function rankOf(store, rank) {
  if (store.ranks.has(rank)) return store.ranks.get(rank);
  const size = Math.max(store.run.size, store.ranks.size + 1);
  const most = Math.max(1000, Math.min(MOST_LINES_OF_A_RANK, Math.floor(320_000 / size)));
  const rankState = {
    rank, state: "starting", detail: "", lineCount: 0, steps: null, profiling: null, profile: null, bars: new Map(), newest: new Map(), devices: new Map(), coordinates: "",
    ring: new RingBuffer(most, Math.max(1_000_000, Math.floor(64_000_000 / size))), open: new Map(),
  };
  // ranks may be heard of in any order
  store.ranks = new Map([...store.ranks, [rank, rankState]].sort(([a], [b]) => a - b));
  return rankState;
}

function takeLine(store, [rank, stream, text, time, open, meaning = ""]) {
  const rankState = rankOf(store, rank);
  const more = text.length - LONGEST_LINE;
  const line = { rank, stream, text: more > 0 ? `${text.slice(0, LONGEST_LINE)} … ${count(more)} more characters in the file` : text, time, meaning };
  if (open) return void rankState.open.set(stream, line);
  rankState.open.delete(stream);
  rankState.ring.push(line);
  store.all.push(line);
}

function takeMetric(store, [name, rank, points], time) {
  const rankState = rankOf(store, rank);
  if (!store.metrics.has(name)) store.metrics.set(name, new Map());
  const series = store.metrics.get(name);
  if (!series.has(rank)) series.set(rank, new Series());
  const curve = series.get(rank);
  for (const [step, value, time] of points) curve.add(step, real(value), time);
  if (points.length) rankState.newest.set(name, real(points.at(-1)[1]));
  store.points += points.length;
  if (points.length) moved(store, time ?? points.at(-1)[2]);
}

/** Something has moved at a time; what was before the run is no time. */
function moved(store, time) {
  if (time >= store.run.started) store.movedAt = Math.max(store.movedAt ?? 0, time);
}

function takeProgress(store, [rank, label, done, total, rate, unit, closed, name = label, note = ""], time) {
  const { bars } = rankOf(store, rank);
  // a bar is also drawn anew where it stands still
  if (bars.get(name)?.done !== done) moved(store, time);
  // in the order in which they began, those that have ended behind them: nested bars keep their order while they move
  if (closed || bars.get(name)?.closed) bars.delete(name);
  bars.set(name, { label, done, total, rate, unit: unit || "it", closed, note });
  if (bars.size > 20) bars.delete([...bars.keys()].find((key) => bars.get(key).closed) ?? bars.keys().next().value);
}

function takeRestarts(store, restarts) {
  const attempt = store.restarts.at(-1)?.[0] ?? 0;
  store.restarts = restarts;
  for (const [number, , , size] of restarts) {
    if (number <= attempt || size === undefined) continue;
    // nodes that were lost, or have come, change the number of ranks
    for (const rank of [...store.ranks.keys()].filter((rank) => rank >= size)) {
      store.ranks.delete(rank);
      // what all ranks have come to, and their sum, would stand still
      for (const series of store.metrics.values()) if (series.size > 1) series.delete(rank);
    }
    for (let rank = 0; rank < size; rank++) rankOf(store, rank);
  }
  if (restarts.at(-1)[0] === attempt) return;
  // bars of processes that are gone move no more
  for (const rankState of store.ranks.values()) rankState.bars.clear();
}

// what a message replaces as a whole, and where it stands
const FACTS = { causes: "causes", failure: "failure", gone: "gone", host: "host", idle_warning: "idleWarning", knob_changes: "knobChanges", line_count: "lineCount" };

/** Takes one message of the kernel in. */
export function feed(store, message) {
  if (message.reset) Object.assign(store, emptyContent(), { epoch: store.epoch + 1, gaps: 0, seq: 0 });
  if (message.seq !== undefined) {
    if (store.seq && message.seq > store.seq + 1) store.gaps += message.seq - store.seq - 1;
    store.seq = message.seq;
  }
  store.changes++;
  store.lastMessageAt = performance.now();
  if (message.now !== undefined) store.clock = message.now - performance.now() / 1000;
  if (message.run) {
    Object.assign(store.run, message.run);
    for (let rank = 0; rank < (message.run.size || 0); rank++) rankOf(store, rank);
  }
  if (message.restarts) takeRestarts(store, message.restarts);
  if (message.nodes) store.nodes = message.nodes.map(([node, label, first, last]) => ({ node, label, first, last }));
  for (const [node, cpu, used, total] of message.loads ?? []) store.loads.set(node, { cpu, used, total });
  if (message.precision) store.precision = message.precision === "no" ? "" : message.precision;
  if (message.state) Object.assign(store, { state: { detail: "", ended: null, ...message.state }, profileError: "" });
  store.following ||= END_STATES.has(store.state.state);
  for (const [rank, state, detail, lineCount] of message.ranks ?? []) Object.assign(rankOf(store, rank), { state, detail, lineCount });
  // of what came before the page was loaded its own times count; a node's clock may be wrong
  const arrived = message.reset ? null : kernelNow(store);
  for (const bar of message.progress ?? []) takeProgress(store, bar, arrived ?? message.moved ?? kernelNow(store));
  for (const [rank, device, utilisation, used, total] of message.devices ?? []) rankOf(store, rank).devices.set(device, { device, utilisation, used, total });
  for (const [rank, coordinates] of message.coordinates ?? []) rankOf(store, rank).coordinates = coordinates;
  for (const [rank, parts] of message.steps ?? []) rankOf(store, rank).steps = parts;
  for (const [name, value, least, most] of message.knobs ?? []) store.knobs.set(name, { value, least, most });
  if (message.knob_error) store.knobErrors.set(message.knob_error.name, message.knob_error.text);
  for (const [rank, parts, total, text] of message.memory ?? []) rankOf(store, rank).memory = { parts, total, text };
  for (const [rank, profiling, profile] of message.profiles ?? []) Object.assign(rankOf(store, rank), { profiling, profile });
  if (message.profiles || message.profile_error) Object.assign(store, { profileRequested: false, profileError: message.profile_error ?? "" });
  for (const line of message.lines ?? []) takeLine(store, line);
  for (const [name, fact] of Object.entries(FACTS)) if (message[name] !== undefined) store[fact] = message[name];
  if (message.skipped) store.skipped += message.skipped;
  for (const metric of message.metrics ?? []) takeMetric(store, metric, arrived);
  if (store.points > MOST_POINTS) {
    const curves = [...store.metrics.values()].flatMap((ofRanks) => [...ofRanks.values()]);
    const longest = curves.reduce((most, { length }) => Math.max(most, length), 0);
    for (const curve of curves) if (curve.length > longest / 2) curve.thin();
    store.points = curves.reduce((total, { length }) => total + length, 0);
  }
  if (message.stacks) Object.assign(store, { stacks: message.stacks, stacksRequested: false });
}

/** The kernel's time in seconds since 1970: the page's own clock may be wrong. */
export function kernelNow(store) {
  return store.clock === null ? Date.now() / 1000 : store.clock + performance.now() / 1000;
}

export function elapsed(store) {
  if (store.run.started === null) return 0;
  return (store.state.ended ?? store.lostAt ?? kernelNow(store)) - store.run.started;
}

/** Whether there is a kernel that hears what is sent. */
export const kernelIsReachable = ({ gone, lostAt }) => !gone && lostAt === null;

/** The lines that have not ended, in the order of ranks; of many the first few, and a line that says which are left out. */
export function openLines(store) {
  const open = [...store.ranks.values()].filter((rankState) => rankState.open.size);
  const lines = open.slice(0, MOST_OPEN_LINES).flatMap((rankState) => [...rankState.open.values()]);
  const left = open.slice(MOST_OPEN_LINES).map((rankState) => rankState.rank);
  if (left.length) {
    const text = `… the open lines of ranks ${spans(left)} are in their own output`;
    lines.push({ rank: null, stream: 0, text, time: lines.at(-1).time });
  }
  return lines;
}

/** Tells the kernel about once a second how far the page has come, so that it can hold back. */
export function acknowledge(store, send) {
  const now = performance.now();
  if (store.seq === store.acknowledged || now - store.acknowledgedAt < 1000) return;
  store.acknowledged = store.seq;
  store.acknowledgedAt = now;
  send({ do: "ack", seq: store.seq });
}

const MOST_CHARACTERS = 24_000_000; // and never more text than that in a ring

/** The newest of many lines: at most so many, and not more than so many characters. */
export class RingBuffer {
  constructor(most, characters = MOST_CHARACTERS) {
    Object.assign(this, { most, characters, items: [], first: 0, length: 0, size: 0, dropped: 0 });
  }

  push(line) {
    this.items[(this.first + this.length++) % (this.most + 1)] = line; // one more than are kept
    this.size += line.text.length;
    while (this.length > this.most || (this.size > this.characters && this.length > 1)) {
      this.size -= this.at(0).text.length;
      this.items[this.first] = undefined;
      this.first = (this.first + 1) % (this.most + 1);
      this.length--;
      this.dropped++;
    }
  }

  at(i) {
    return this.items[(this.first + i) % (this.most + 1)];
  }
}

/** The bars of a rank that move, outermost first. */
export const openBars = ({ bars }) => [...bars.values()].filter((bar) => !bar.closed);

/** How far a rank is: its newest open bar, and the one around it. */
export function progressOf(rankState) {
  const open = openBars(rankState);
  const bar = open.at(-1) ?? [...rankState.bars.values()].at(-1);
  return { bar, outer: open.length > 1 ? open.at(-2) : null };
}

export function progressText(bar, moving = true) {
  const parts = [`${count(bar.done)}${bar.ahead > bar.done ? `–${count(bar.ahead)}` : ""}${isKnown(bar.total) ? `/${count(bar.total)}` : ` ${bar.unit}`}`];
  if (bar.rate) parts.push(rateText(bar));
  if (moving && bar.rate && bar.total && !bar.closed && bar.done < bar.total) parts.push(`${duration((bar.total - bar.done) / bar.rate)} left`);
  return parts.join(" · ");
}

/** 16.5 it/s, or 4.2 s/it. */
const rateText = ({ rate, unit }) => (rate >= 1 ? `${rate.toFixed(rate < 100 ? 1 : 0)} ${unit}/s` : `${(1 / rate).toFixed(1)} s/${unit}`);

export const shareOf = (bar) => (bar?.total ? Math.min(1, bar.done / bar.total) : bar?.closed ? 1 : 0);

/** The part of the outermost bar that is done, the inner ones counted as parts of one unit of it; null where it has no total. */
export function shareDone(bars) {
  if (!(bars[0]?.total > 0)) return null;
  const [bar, ...inner] = bars;
  return Math.min(1, (bar.done + (bar.done < bar.total ? (shareDone(inner) ?? 0) : 0)) / bar.total);
}

/** epoch 6/14: while something moves inside of it, the unit that is being done. */
export function labelOf(bar, isOuter) {
  const name = bar.label === "progress" ? "" : bar.label;
  if (!(bar.total > 0)) return [name, count(bar.done), bar.unit].filter(Boolean).join(" ");
  const done = isOuter ? Math.min(bar.done + 1, bar.total) : bar.done;
  return [name, `${count(done)}/${count(bar.total)}`].filter(Boolean).join(" ");
}

const SILENT_AFTER = 8; // seconds
const SILENT_STEPS = 4; // and so many steps' time

/** Seconds that one unit of the outermost bar takes: by its own rate, or else by those inside of it; null where nothing says. */
function secondsOfUnit([bar, ...inner]) {
  if (bar.rate > 0) return 1 / bar.rate;
  if (!(inner[0]?.total > 0)) return null;
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
