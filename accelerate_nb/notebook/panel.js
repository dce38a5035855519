// The live panel of a run: what the kernel says in numbered messages, kept in a bounded store and painted five times a second.
//
// One plain module without dependencies. The store belongs to the widget's model, so that every view of it shows the same;
// a view belongs to one place in the page. `mount` draws the same panel from messages alone, without a kernel.

const SYMBOLS = { starting: "○", running: "▶", finished: "✓", failed: "✕", stopped: "■", stopping: "◼" };
const OVER = new Set(["finished", "failed", "stopped"]);

const LINE = 18; // height of a line of the log in pixels: fixed, so that only the visible ones need to exist
const ROW = 27; // height of a rank's row
const MOST_LINES = 50_000; // kept of all ranks together
const MOST_LINES_OF_A_RANK = 20_000;
const MOST_CHARACTERS = 24_000_000; // and never more text than that in a ring
const LONGEST_LINE = 10_000; // characters of a line that are kept; the whole of it is in the file
const MOST_POINTS = 400_000; // of all charts together; beyond, the longest series are thinned
const MOST_BUCKETS = 2048; // of a series, for drawing: more than there are pixels
const SILENCE = 30; // seconds without a message after which that is said
const CHART_TIME = 25; // ms that charts may take of one painting
const PAINT = 200; // ms between two paintings
const FEW_RANKS = 16; // up to here each rank has a full row and a tab
const FEW_LINES_IN_A_CHART = 8; // up to here each rank is a line, beyond they are a band

// ------------------------------------------------------------------------------------------------------------- small things

const listeners = /^on[a-z]/;

/** An element: `on…` are listeners, other properties attributes (absent when null or false), text goes in as text. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (listeners.test(name)) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const div = (name, ...children) => h("div", { class: name }, ...children);
const span = (name, ...children) => h("span", { class: name }, ...children);

function button(name, label, onclick, more = {}) {
  return h("button", { type: "button", class: `anb-btn ${name}`, onclick, ...more }, label);
}

// Writing only what changed keeps painting cheap, and leaves a selection alone.
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
function set(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}
function show(element, shown) {
  if (element.hidden === shown) element.hidden = !shown;
}

/** A number as a person reads it: four digits that matter. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return String(value);
  return size >= 1e4 ? value.toFixed(0) : value.toPrecision(4);
}

/** A mark of a scale: the shortest that says it. */
function mark(value) {
  const text = number(value);
  if (text.includes("e")) return text.replace(/\.?0*e/, "e");
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

const grouped = new Intl.NumberFormat("en"); // made once: `toLocaleString` makes one for each number

/** How many of something: 1,234, or 12.3 M where that is shorter. */
export function count(value) {
  if (value === null || value === undefined) return "?";
  if (value >= 1e9) return `${(value / 1e9).toFixed(2)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  return Number.isInteger(value) ? grouped.format(value) : value.toFixed(1);
}

/** Seconds as 1:02:03 or 02:03. */
export function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (n) => String(n).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return `${hours ? `${hours}:` : ""}${two(minutes)}:${two(whole % 60)}`;
}

/** Bytes in the unit that leaves a short number. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit++) value /= 1024;
  return `${value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

/** 55.0/80.0 GiB: the unit once where it is the same. */
function ofBytes(used, total) {
  const [a, b] = [bytes(used), bytes(total)];
  const unit = b.split(" ")[1];
  return a.endsWith(` ${unit}`) ? `${a.split(" ")[0]}/${b}` : `${a}/${b}`;
}

function clockTime(seconds) {
  const at = new Date(seconds * 1000);
  return `${at.toLocaleTimeString("en-GB")}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}

/** JSON has no NaN and no infinity; the kernel writes their names. */
export function real(value) {
  if (typeof value !== "string") return value;
  return { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] ?? Number(value);
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // no clipboard on a page served over plain http: the old way
    const area = h("textarea", { "aria-hidden": "true", style: "position:fixed;opacity:0" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** A button that copies what `text` returns, and says so. */
function copyButton(label, text, announce) {
  const copy = button("anb-quiet-btn", label, async () => {
    const was = document.activeElement;
    await copyText(text());
    was?.focus?.();
    say(copy, "Copied");
    announce("Copied");
    setTimeout(() => say(copy, label), 1200);
  });
  return copy;
}

// -------------------------------------------------------------------------------------------------------------------- ANSI

const ESCAPES = /\x1b\[([0-9;:]*)m|\x1b\[[0-9;:?<>=!]*(?:[@-~]|$)|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\|$)|\x1b[()][A-Z0-9]|\x1b.?|[\x00-\x08\x0b-\x1f\x7f]/g;
const CUBE = [0, 95, 135, 175, 215, 255];

function colourOf256(n) {
  if (n < 16) return `var(--anb-a${n})`;
  if (n >= 232) return `rgb(${Array(3).fill(8 + 10 * (n - 232))})`;
  return `rgb(${[36, 6, 1].map((place) => CUBE[Math.floor((n - 16) / place) % 6])})`;
}

/** Takes the codes of one `ESC[…m` into `style`, and returns the style that follows. */
function graphicRendition(style, codes) {
  const next = { ...style };
  for (let i = 0; i < codes.length; i++) {
    const code = codes[i];
    if (code === 0) for (const name of Object.keys(next)) delete next[name];
    else if (code === 1) next.bold = true;
    else if (code === 2) next.faint = true;
    else if (code === 3) next.italic = true;
    else if (code === 4) next.underline = true;
    else if (code === 7) next.inverse = true;
    else if (code === 9) next.through = true;
    else if (code === 22) next.bold = next.faint = false;
    else if (code === 23) next.italic = false;
    else if (code === 24) next.underline = false;
    else if (code === 27) next.inverse = false;
    else if (code === 29) next.through = false;
    else if (code >= 30 && code <= 37) next.fg = colourOf256(code - 30);
    else if (code >= 90 && code <= 97) next.fg = colourOf256(code - 82);
    else if (code >= 40 && code <= 47) next.bg = colourOf256(code - 40);
    else if (code >= 100 && code <= 107) next.bg = colourOf256(code - 92);
    else if (code === 39) next.fg = null;
    else if (code === 49) next.bg = null;
    else if (code === 38 || code === 48) {
      const place = code === 38 ? "fg" : "bg";
      if (codes[i + 1] === 5) {
        next[place] = colourOf256(codes[i + 2] & 255);
        i += 2;
      } else if (codes[i + 1] === 2) {
        next[place] = `rgb(${codes.slice(i + 2, i + 5).map((part) => part & 255)})`;
        i += 4;
      }
    }
  }
  return next;
}

function cssOf(style) {
  const [fg, bg] = style.inverse ? [style.bg ?? "var(--anb-bg)", style.fg ?? "var(--anb-fg)"] : [style.fg, style.bg];
  const lines = [style.underline && "underline", style.through && "line-through"].filter(Boolean).join(" ");
  return [
    fg && `color:${fg}`,
    bg && `background:${bg}`,
    style.bold && "font-weight:700",
    style.faint && "opacity:.75",
    style.italic && "font-style:italic",
    lines && `text-decoration:${lines}`,
  ].filter(Boolean).join(";");
}

/** The pieces of a line: `[{text, css}]`, without a control character left in it. */
export function ansi(text) {
  const pieces = [];
  let style = {};
  let end = 0;
  const emit = (piece) => piece && pieces.push({ text: piece, css: cssOf(style) });
  for (const found of text.matchAll(ESCAPES)) {
    emit(text.slice(end, found.index));
    end = found.index + found[0].length;
    if (found[1] !== undefined) style = graphicRendition(style, found[1].split(/[;:]/).map(Number));
  }
  emit(text.slice(end));
  return pieces;
}

/** A line without its colours: what is searched and copied. */
export function plain(text) {
  return text.replace(ESCAPES, "");
}

// ------------------------------------------------------------------------------------------------------------------- store

/** The newest of many lines: at most so many, and not more than so many characters. */
export class Ring {
  constructor(most, characters = MOST_CHARACTERS) {
    this.most = most;
    this.characters = characters;
    this.items = [];
    this.first = 0;
    this.length = 0;
    this.size = 0;
    this.dropped = 0;
  }

  push(line) {
    if (this.length === this.most) this.drop();
    this.items[(this.first + this.length) % this.most] = line;
    this.length++;
    this.size += line.text.length;
    while (this.size > this.characters && this.length > 1) this.drop();
  }

  drop() {
    this.size -= this.at(0).text.length;
    this.items[this.first] = undefined;
    this.first = (this.first + 1) % this.most;
    this.length--;
    this.dropped++;
  }

  at(i) {
    return this.items[(this.first + i) % this.most];
  }
}

/** One metric of one rank: every point while there are not too many, and buckets of least, most and mean to draw. */
export class Series {
  constructor() {
    this.x = new Float64Array(64);
    this.y = new Float64Array(64);
    this.length = 0;
    this.buckets = [];
    this.per = 1; // points in a full bucket
    this.came = 0;
    this.sorted = true;
    this.from = Infinity;
    this.to = -Infinity;
    this.least = Infinity;
    this.most = -Infinity;
    this.leastPositive = Infinity;
    this.odd = 0; // values that are no finite numbers
    this.notPositive = 0;
    this.last = null;
    this.every = 1; // after thinning, one of so many points is kept
  }

  add(x, y) {
    if (this.last !== null && x < this.last[0]) this.sorted = false;
    this.last = [x, y];
    this.from = Math.min(this.from, x);
    this.to = Math.max(this.to, x);
    if (this.came % this.every === 0) this.keep(x, y);
    this.came++;
    this.account(y);
    this.intoBucket(x, y);
  }

  keep(x, y) {
    if (this.length === this.x.length) {
      const [oldX, oldY] = [this.x, this.y];
      this.x = new Float64Array(oldX.length * 2);
      this.y = new Float64Array(oldY.length * 2);
      this.x.set(oldX);
      this.y.set(oldY);
    }
    this.x[this.length] = x;
    this.y[this.length++] = y;
  }

  account(y) {
    if (!Number.isFinite(y)) {
      this.odd++;
      return;
    }
    if (y < this.least) this.least = y;
    if (y > this.most) this.most = y;
    if (y > 0) this.leastPositive = Math.min(this.leastPositive, y);
    else this.notPositive++;
  }

  intoBucket(x, y) {
    let bucket = this.buckets.at(-1);
    if (!bucket || bucket.points >= this.per) {
      if (this.buckets.length >= MOST_BUCKETS) this.mergeBuckets();
      bucket = this.buckets.at(-1);
      if (!bucket || bucket.points >= this.per) this.buckets.push((bucket = emptyBucket(x)));
    }
    bucket.points++;
    bucket.to = x;
    if (!Number.isFinite(y)) return;
    if (!bucket.finite++) bucket.first = y;
    bucket.last = y;
    bucket.sum += y;
    if (y < bucket.least) bucket.least = y;
    if (y > bucket.most) bucket.most = y;
    if (y > 0) {
      if (y < bucket.leastPositive) bucket.leastPositive = y;
      bucket.positive++;
      bucket.positiveSum += y;
    }
  }

  mergeBuckets() {
    const merged = [];
    for (let i = 0; i < this.buckets.length; i += 2) merged.push(joined(this.buckets[i], this.buckets[i + 1]));
    this.buckets = merged;
    this.per *= 2;
  }

  /** Forgets every second point; what is drawn does not change. */
  thin() {
    const half = Math.ceil(this.length / 2);
    for (let i = 0; i < half; i++) {
      this.x[i] = this.x[2 * i];
      this.y[i] = this.y[2 * i];
    }
    this.x = this.x.slice(0, half);
    this.y = this.y.slice(0, half);
    this.length = half;
    this.every *= 2;
  }

  /** The point whose step is nearest to `x`, as `[x, y]`. */
  nearest(x) {
    if (!this.length) return null;
    let best = 0;
    if (this.sorted) {
      let [low, high] = [0, this.length - 1];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (this.x[middle] < x) low = middle + 1;
        else high = middle;
      }
      best = low > 0 && x - this.x[low - 1] <= this.x[low] - x ? low - 1 : low;
    } else {
      for (let i = 1; i < this.length; i++) if (Math.abs(this.x[i] - x) <= Math.abs(this.x[best] - x)) best = i;
    }
    const point = [this.x[best], this.y[best]];
    // the newest is always known, also where points were thinned
    return Math.abs(this.last[0] - x) < Math.abs(point[0] - x) ? this.last : point;
  }
}

function emptyBucket(x) {
  return {
    from: x, to: x, points: 0, finite: 0, first: NaN, last: NaN, sum: 0, least: Infinity, most: -Infinity,
    leastPositive: Infinity, positive: 0, positiveSum: 0,
  };
}

function joined(a, b) {
  if (!b) return a;
  return {
    from: a.from, to: b.to, points: a.points + b.points, finite: a.finite + b.finite,
    first: a.finite ? a.first : b.first, last: b.finite ? b.last : a.last, sum: a.sum + b.sum,
    least: Math.min(a.least, b.least), most: Math.max(a.most, b.most),
    leastPositive: Math.min(a.leastPositive, b.leastPositive),
    positive: a.positive + b.positive, positiveSum: a.positiveSum + b.positiveSum,
  };
}

function emptyContent() {
  return {
    run: { name: "", why: "", folder: "", started: null, size: 0, host: "", background: false, can_act: false },
    state: { state: "starting", detail: "", ended: null },
    ranks: new Map(), // rank -> what is known of it
    metrics: new Map(), // name -> rank -> Series
    host: [],
    all: new Ring(MOST_LINES),
    lineCount: 0,
    skipped: 0,
    points: 0,
    failure: null,
    quiet: null,
  };
}

/** What one model knows; its views read it. `epoch` grows when everything was forgotten. */
export function makeStore() {
  return {
    ...emptyContent(),
    epoch: 0, changes: 0, seq: 0, gaps: 0, clock: null, heard: 0, stacks: null, stacksAsked: false, following: true,
    views: new Set(), acknowledged: 0, acknowledgedAt: 0,
  };
}

function rankOf(store, rank) {
  let known = store.ranks.get(rank);
  if (!known) {
    const size = Math.max(store.run.size, store.ranks.size + 1);
    const most = Math.max(1000, Math.min(MOST_LINES_OF_A_RANK, Math.floor(320_000 / size)));
    known = {
      rank, state: "starting", detail: "", lineCount: 0, bars: new Map(), newest: new Map(), devices: new Map(),
      ring: new Ring(most, Math.max(1_000_000, Math.floor(64_000_000 / size))), open: new Map(),
    };
    store.ranks.set(rank, known);
    // ranks may be heard of in any order
    store.ranks = new Map([...store.ranks].sort(([a], [b]) => a - b));
  }
  return known;
}

const clipped = (text) =>
  text.length <= LONGEST_LINE ? text : `${text.slice(0, LONGEST_LINE)} … ${count(text.length - LONGEST_LINE)} more characters in the file`;

function takeLine(store, [rank, stream, text, time, open]) {
  const known = rankOf(store, rank);
  const line = { rank, stream, text: clipped(text), time };
  if (open) {
    known.open.set(stream, line);
    return;
  }
  known.open.delete(stream);
  known.ring.push(line);
  store.all.push(line);
}

function takeMetric(store, [name, rank, points]) {
  const known = rankOf(store, rank);
  if (!store.metrics.has(name)) store.metrics.set(name, new Map());
  const series = store.metrics.get(name);
  if (!series.has(rank)) series.set(rank, new Series());
  const one = series.get(rank);
  for (const [step, value] of points) one.add(step ?? one.came, real(value));
  if (points.length) known.newest.set(name, real(points.at(-1)[1]));
  store.points += points.length;
  while (store.points > MOST_POINTS) thinLongest(store);
}

function thinLongest(store) {
  let longest = null;
  let total = 0;
  for (const series of store.metrics.values()) {
    for (const one of series.values()) {
      total += one.length;
      if (!longest || one.length > longest.length) longest = one;
    }
  }
  store.points = total;
  if (total <= MOST_POINTS) return;
  const before = longest.length;
  longest.thin();
  store.points -= before - longest.length;
}

function takeProgress(store, [rank, label, done, total, rate, unit, closed, name = label, note = ""]) {
  const { bars } = rankOf(store, rank);
  // in the order in which they began, those that have ended behind them: nested bars keep their order while they move
  if (closed || bars.get(name)?.closed) bars.delete(name);
  bars.set(name, { label, done, total, rate, unit: unit || "it", closed, note });
  if (bars.size > 20) bars.delete([...bars.keys()].find((one) => bars.get(one).closed) ?? bars.keys().next().value);
}

/** Takes one message of the kernel in. */
export function feed(store, message) {
  if (message.reset) Object.assign(store, emptyContent(), { epoch: store.epoch + 1, gaps: 0, seq: 0 });
  if (message.seq !== undefined) {
    if (store.seq && message.seq > store.seq + 1) store.gaps += message.seq - store.seq - 1;
    store.seq = message.seq;
  }
  store.changes++;
  store.heard = performance.now();
  if (message.now !== undefined) store.clock = message.now - performance.now() / 1000;
  if (message.run) {
    Object.assign(store.run, message.run);
    for (let rank = 0; rank < (message.run.size || 0); rank++) rankOf(store, rank);
  }
  if (message.state) store.state = { detail: "", ended: null, ...message.state };
  for (const [rank, state, detail, lineCount] of message.ranks ?? []) {
    Object.assign(rankOf(store, rank), { state, detail, lineCount });
  }
  for (const one of message.progress ?? []) takeProgress(store, one);
  for (const [rank, device, utilisation, used, total] of message.devices ?? []) {
    rankOf(store, rank).devices.set(device, { device, utilisation, used, total });
  }
  if (message.host) store.host = message.host;
  for (const line of message.lines ?? []) takeLine(store, line);
  if (message.line_count !== undefined) store.lineCount = message.line_count;
  if (message.skipped) store.skipped += message.skipped;
  for (const one of message.metrics ?? []) takeMetric(store, one);
  if (message.failure !== undefined) store.failure = message.failure;
  if (message.quiet !== undefined) store.quiet = message.quiet;
  if (message.stacks) Object.assign(store, { stacks: message.stacks, stacksAsked: false });
}

/** The kernel's time in seconds since 1970: the page's own clock may be wrong. */
function kernelNow(store) {
  return store.clock === null ? Date.now() / 1000 : store.clock + performance.now() / 1000;
}

function elapsed(store) {
  if (store.run.started === null) return 0;
  return (store.state.ended ?? kernelNow(store)) - store.run.started;
}

// --------------------------------------------------------------------------------------------------------------------- log

/** A line's row: gutter (time, rank, stream) and the coloured text, with what was searched marked. */
function fillRow(row, line, { showRank, times, query }) {
  row.className = line.stream ? "anb-line anb-stderr" : "anb-line";
  const gutter = [];
  if (times) gutter.push(span("anb-time", clockTime(line.time)));
  if (showRank()) gutter.push(span(`anb-rank anb-r${line.rank % 8}`, String(line.rank)));
  gutter.push(line.stream ? h("span", { class: "anb-mark", title: "stderr" }, "!", span("anb-sr", " stderr ")) : span("anb-mark"));
  row.replaceChildren(...gutter, ...pieces(line.text, query), "\n");
}

function pieces(text, query) {
  const parts = ansi(text);
  const hits = query ? places(parts.map((part) => part.text).join(""), query) : [];
  const nodes = [];
  let at = 0;
  for (const part of parts) {
    for (const [piece, hit] of cut(part.text, at, hits, query?.length ?? 0)) {
      if (!hit && !part.css) nodes.push(document.createTextNode(piece));
      else nodes.push(h(hit ? "mark" : "span", { class: hit ? "anb-hit" : null, style: part.css || null }, piece));
    }
    at += part.text.length;
  }
  return nodes;
}

/** Where `query` (lower case) occurs; nowhere where lower case has another length than the text. */
function places(text, query) {
  const low = text.toLowerCase();
  const found = [];
  if (low.length !== text.length) return found;
  for (let i = low.indexOf(query); i >= 0 && found.length < 500; i = low.indexOf(query, i + query.length)) found.push(i);
  return found;
}

/** A piece of text that begins at `at`, cut where hits of a length begin and end: `[[piece, isHit]]`. */
function cut(text, at, hits, length) {
  const out = [];
  let from = 0;
  for (const hit of hits) {
    const [start, end] = [Math.max(0, hit - at), Math.min(text.length, hit + length - at)];
    if (end <= 0 || start >= text.length) continue;
    if (start > from) out.push([text.slice(from, start), false]);
    out.push([text.slice(start, end), true]);
    from = end;
  }
  if (from < text.length) out.push([text.slice(from), false]);
  return out;
}

/** One scrolling log over a ring. Rows exist only where one looks, and stay the same elements while they are in sight. */
class LogView {
  constructor({ ring, open, showRank, label, changed }) {
    Object.assign(this, { ring, open, showRank, changed });
    this.follow = true;
    this.query = "";
    this.only = false;
    this.times = false;
    this.current = null; // number of the line that the search stands at
    this.rows = new Map(); // number of the line -> {row, line}
    this.height = -1;
    this.inner = div("anb-lines");
    this.scroller = h(
      "div",
      { class: "anb-log", role: "log", "aria-live": "off", "aria-label": label, tabindex: "0", onscroll: () => this.scrolled() },
      this.inner,
    );
    this.jump = button("anb-jump", "", () => this.toNewest());
    this.empty = div("anb-empty", "Nothing written yet");
    this.element = div("anb-logbox", this.scroller, this.jump, this.empty);
    this.forget();
  }

  forget() {
    this.source = this.ring();
    this.matches = [];
    this.searched = 0; // number of the first line that was not searched yet
    this.seen = this.source.dropped;
    this.newestSeen = this.source.dropped + this.source.length;
    this.clearRows();
  }

  clearRows() {
    this.rows.clear();
    this.inner.replaceChildren();
  }

  configure({ query = this.query, only = this.only, times = this.times }) {
    if (query !== this.query) Object.assign(this, { matches: [], searched: 0, current: null });
    Object.assign(this, { query, only, times });
    this.clearRows();
    this.draw();
  }

  /** The numbers of the lines that match; new lines are searched once. */
  search() {
    const { source } = this;
    const end = source.dropped + source.length;
    if (!this.query) return 0;
    for (let i = Math.max(this.searched, source.dropped); i < end; i++) {
      if (this.hits(source.at(i - source.dropped))) this.matches.push(i);
    }
    this.searched = end;
    let gone = 0;
    while (gone < this.matches.length && this.matches[gone] < source.dropped) gone++;
    if (gone) this.matches.splice(0, gone);
    return gone;
  }

  hits(line) {
    return plain(line.text).toLowerCase().includes(this.query);
  }

  measure() {
    this.sight = this.scroller.clientHeight;
  }

  scrolled() {
    const at = this.scroller.scrollTop;
    if (at === this.top) return; // we did it ourselves
    // only a person makes it go up: what grows below is no reason to stop following
    if (at + this.sight >= this.height * LINE - LINE) this.follow = true;
    else if (at < this.top - 1) this.follow = false;
    this.draw();
    this.changed();
  }

  toNewest() {
    document.getSelection()?.removeAllRanges();
    this.follow = true;
    this.draw();
    this.changed();
    this.scroller.focus({ preventScroll: true });
  }

  selecting() {
    const selection = document.getSelection();
    return Boolean(selection && !selection.isCollapsed && this.inner.contains(selection.anchorNode));
  }

  draw() {
    if (this.ring() !== this.source) this.forget();
    const { scroller, source } = this;
    const goneMatches = this.search();
    const filtered = this.only && this.query !== "";
    const open = filtered ? this.open().filter((line) => this.hits(line)) : this.open();
    const whole = filtered ? this.matches.length : source.length;
    const length = whole + open.length;
    show(this.empty, length === 0);
    say(this.empty, filtered ? "No line matches" : "Nothing written yet");
    if (!this.sight) this.measure();
    if (!this.sight) return;
    const held = this.selecting();
    const gone = filtered ? goneMatches : source.dropped - this.seen;
    this.seen = source.dropped;
    if (length !== this.height) this.inner.style.height = `${(this.height = length) * LINE}px`;
    if (this.follow && !held) {
      scroller.scrollTop = length * LINE;
      this.newestSeen = source.dropped + source.length;
    } else if (gone) scroller.scrollTop = Math.max(0, scroller.scrollTop - gone * LINE);
    this.top = scroller.scrollTop; // what the browser made of it
    this.drawRows({ filtered, open, whole, length, held });
    this.drawJump(held);
  }

  drawRows({ filtered, open, whole, length, held }) {
    const { source } = this;
    const from = Math.max(0, Math.floor(this.top / LINE) - 5);
    const to = Math.min(length, Math.ceil((this.top + this.sight) / LINE) + 5);
    const end = source.dropped + source.length;
    const wanted = new Map();
    for (let i = from; i < to; i++) {
      if (i >= whole) wanted.set(end + i - whole, [i, open[i - whole]]);
      else if (filtered) wanted.set(this.matches[i], [i, source.at(this.matches[i] - source.dropped)]);
      else wanted.set(source.dropped + i, [i, source.at(i)]);
    }
    for (const [key, { row }] of this.rows) {
      if (wanted.has(key)) continue;
      // what is selected stays in the page, so that it can be copied whole
      if (held && this.rows.size < 3000 && !filtered && key >= source.dropped) wanted.set(key, [key - source.dropped, null]);
      else {
        row.remove();
        this.rows.delete(key);
      }
    }
    this.place(wanted, held);
  }

  place(wanted, held) {
    let next = this.inner.firstChild;
    for (const key of [...wanted.keys()].sort((a, b) => a - b)) {
      const [position, line] = wanted.get(key);
      let known = this.rows.get(key);
      if (!known) {
        known = { row: h("div", { class: "anb-line" }), line: null, text: null };
        this.rows.set(key, known);
      }
      if (line && (known.line !== line || known.text !== line.text) && !(held && known.line)) {
        fillRow(known.row, line, this);
        Object.assign(known, { line, text: line.text });
      }
      known.row.style.top = `${position * LINE}px`;
      known.row.classList.toggle("anb-current", key === this.current);
      if (known.row === next) next = next.nextSibling;
      else this.inner.insertBefore(known.row, next);
    }
  }

  drawJump(held) {
    const news = this.source.dropped + this.source.length - this.newestSeen;
    show(this.jump, !this.follow || held);
    say(this.jump, news > 0 ? `↓ Jump to newest (${count(news)} new)` : "↓ Jump to newest");
  }

  /** Goes to the match with this number in `matches`. */
  goTo(index) {
    this.current = this.matches[index];
    this.follow = false;
    const position = this.only ? index : this.current - this.source.dropped;
    this.scroller.scrollTop = Math.max(0, position * LINE - this.sight / 2);
    this.draw();
    this.changed();
  }

  /** All lines that it shows, as text; with ranks where it shows them. */
  text() {
    const lines = [];
    const { source } = this;
    for (let i = 0; i < source.length; i++) lines.push(source.at(i));
    lines.push(...this.open());
    return lines
      .filter((line) => !(this.only && this.query) || this.hits(line))
      .map((line) => (this.times ? `${clockTime(line.time)} ` : "") + (this.showRank() ? `[${line.rank}] ` : "") + plain(line.text))
      .join("\n");
  }
}

// ------------------------------------------------------------------------------------------------------------------ charts

/** Round numbers between two values: about `most` of them. */
export function ticks(least, most, about = 3) {
  const rough = (most - least) / about;
  if (!(rough > 0) || !Number.isFinite(rough)) return [least];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let i = Math.ceil(least / step - 1e-9); i * step <= most + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** The same for a scale of powers of ten. */
export function logTicks(least, most) {
  const [from, to] = [Math.ceil(Math.log10(least) - 1e-9), Math.floor(Math.log10(most) + 1e-9)];
  if (to - from < 1) return ticks(least, most).filter((value) => value > 0);
  const step = Math.ceil((to - from + 1) / 4);
  const found = [];
  for (let power = from; power <= to; power += step) found.push(10 ** power);
  return found;
}

/** Least, most, first, last and mean of a series in each column of pixels. */
export function columns(series, from, to, width, logarithmic) {
  const found = new Array(width);
  const scale = to > from ? (width - 1) / (to - from) : 0;
  for (const bucket of series.buckets) {
    const points = logarithmic ? bucket.positive : bucket.finite;
    const column = to > from ? Math.round(((bucket.from + bucket.to) / 2 - from) * scale) : Math.floor(width / 2);
    if (!points || column < 0 || column >= width) continue;
    const one = (found[column] ??= { least: Infinity, most: -Infinity, first: 0, last: 0, sum: 0, points: 0 });
    const least = logarithmic ? bucket.leastPositive : bucket.least;
    const usable = (value) => (logarithmic && value <= 0 ? least : value);
    if (!one.points) one.first = usable(bucket.first);
    one.last = usable(bucket.last);
    one.least = Math.min(one.least, least);
    one.most = Math.max(one.most, bucket.most);
    one.sum += logarithmic ? bucket.positiveSum : bucket.sum;
    one.points += points;
  }
  return found;
}

/** One metric: a canvas with its scale, a crosshair, and the values where it stands. */
class Chart {
  constructor(name, view) {
    this.name = name;
    this.view = view;
    this.logarithmic = false;
    this.visible = true;
    this.drawn = "";
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.value = span("anb-chart-value");
    this.note = span("anb-chart-note");
    this.cross = div("anb-cross");
    this.tip = div("anb-tip");
    this.log = button("anb-mini", "log", () => this.toggleLog(), { "aria-pressed": "false", "aria-label": `${name}: logarithmic scale` });
    this.size = button("anb-mini", "⤢", () => this.toggleSize(), { "aria-pressed": "false", "aria-label": `${name}: large`, title: "large" });
    this.plot = h(
      "div",
      {
        class: "anb-plot", tabindex: "0", role: "img", "aria-roledescription": "chart",
        onpointermove: (event) => this.pointAt(event.offsetX), onpointerleave: () => this.view.moveCross(null),
        onkeydown: (event) => this.key(event), onblur: () => this.view.moveCross(null),
      },
      this.canvas,
      this.cross,
    );
    this.element = h(
      "div",
      { class: "anb-chart", role: "group", "aria-label": `metric ${name}` },
      div("anb-chart-head", h("span", { class: "anb-chart-name", title: name }, name), this.value, this.note, this.log, this.size),
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

  get series() {
    return this.view.store.metrics.get(this.name) ?? new Map();
  }

  /** Whether ranks are shown as one band rather than as a line each. */
  get banded() {
    return this.view.band && this.series.size > 1;
  }

  range() {
    let [from, to, least, most] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const one of this.series.values()) {
      from = Math.min(from, one.from);
      to = Math.max(to, one.to);
      least = Math.min(least, this.logarithmic ? one.leastPositive : one.least);
      most = Math.max(most, one.most);
    }
    if (this.logarithmic && most <= 0) [least, most] = [NaN, NaN];
    return { from, to, ...this.padded(least, most) };
  }

  padded(least, most) {
    if (!Number.isFinite(least) || !Number.isFinite(most)) return { least: 0, most: 1, empty: true };
    if (this.logarithmic) {
      const room = least === most ? 2 : (most / least) ** 0.05;
      return { least: least / room, most: most * room };
    }
    const room = most > least ? (most - least) * 0.06 : Math.abs(most) * 0.1 || 1;
    return { least: least - room, most: most + room };
  }

  draw(force = false) {
    this.paintNews(force);
    this.tellNews();
  }

  tellNews() {
    this.head();
    if (this.view.cross !== null) this.drawCross();
  }

  paintNews(force = false) {
    if (force || !this.width) this.measure();
    const { width, height } = this;
    const state = [width, height, this.view.band, this.logarithmic, this.view.palette.key, this.points()].join();
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
    for (const one of this.series.values()) total += one.came;
    return total;
  }

  head() {
    const last = [...this.series.values()].map((one) => one.last?.[1]).filter((value) => value !== undefined);
    const mean = last.reduce((sum, value) => sum + value, 0) / last.length;
    if (this.view.cross === null) say(this.value, number(last.length > 1 ? mean : last[0]));
    let [odd, notPositive, least, most] = [0, 0, Infinity, -Infinity];
    for (const one of this.series.values()) {
      odd += one.odd;
      notPositive += one.notPositive;
      least = Math.min(least, one.least);
      most = Math.max(most, one.most);
    }
    const notes = [];
    if (odd) notes.push(`⚠ ${count(odd)} not finite`);
    if (this.logarithmic && notPositive) notes.push(`⚠ ${count(notPositive)} ≤ 0 not shown`);
    say(this.note, notes.join(", "));
    const steps = Math.max(0, ...[...this.series.values()].map((one) => one.last?.[0] ?? 0));
    const label =
      `${this.name}: newest ${number(last.length > 1 ? mean : last[0])}${last.length > 1 ? ` (mean of ${last.length} ranks)` : ""}, ` +
      `from ${number(least)} to ${number(most)}, up to step ${number(steps)}. Arrow keys read single steps.`;
    set(this.plot, "aria-label", label);
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
    const marks = range.empty ? [] : this.logarithmic ? logTicks(range.least, range.most) : ticks(range.least, range.most);
    pen.font = `10px ${this.view.palette.font}`;
    const gutter = Math.max(24, ...marks.map((value) => pen.measureText(mark(value)).width + 8));
    const box = { left: Math.ceil(gutter), right: width - 6, top: 5, bottom: height - 15 };
    this.scale = { ...range, ...box, ...this.scales(range, box) };
    this.paintAxes(pen, marks);
    if (range.empty) return;
    if (this.banded) this.paintBand(pen);
    else for (const [rank, one] of [...this.series].reverse()) this.paintLine(pen, one, this.view.palette.ranks[rank % 8]);
  }

  scales({ from, to, least, most }, { left, right, top, bottom }) {
    const place = this.logarithmic
      ? (value) => bottom - ((Math.log(value) - Math.log(least)) / (Math.log(most) - Math.log(least))) * (bottom - top)
      : (value) => bottom - ((value - least) / (most - least)) * (bottom - top);
    const across = (x) => (to > from ? left + ((x - from) / (to - from)) * (right - left) : (left + right) / 2);
    return { place, across };
  }

  paintAxes(pen, marks) {
    const { left, right, bottom, place, from, to, empty } = this.scale;
    const { dim, grid } = this.view.palette;
    pen.fillStyle = dim;
    pen.strokeStyle = grid;
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const value of marks) {
      const y = Math.round(place(value)) + 0.5;
      pen.beginPath();
      pen.moveTo(left, y);
      pen.lineTo(right, y);
      pen.stroke();
      pen.fillText(mark(value), left - 4, y);
    }
    pen.textBaseline = "alphabetic";
    if (empty) {
      pen.textAlign = "center";
      pen.fillText(this.logarithmic ? "no value above 0" : "no finite value", (left + right) / 2, bottom / 2 + 8);
    }
    if (!Number.isFinite(from)) return;
    pen.textAlign = "left";
    pen.fillText(number(from), left, bottom + 12);
    pen.textAlign = "right";
    if (to > from) pen.fillText(number(to), right, bottom + 12);
  }

  columnsOf(one) {
    const { from, to, left, right } = this.scale;
    return columns(one, from, to, Math.max(2, Math.floor(right - left) + 1), this.logarithmic);
  }

  paintLine(pen, one, colour) {
    const { left, place } = this.scale;
    const found = this.columnsOf(one);
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
    if (drawn === 1) this.dot(pen, found, colour);
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
    const { accent } = this.view.palette;
    const band = bandOf([...this.series.values()].map((one) => this.columnsOf(one)));
    pen.fillStyle = accent;
    pen.globalAlpha = 0.22;
    pen.beginPath();
    for (const { x, most } of band) pen.lineTo(left + x, place(most));
    for (const { x, least } of [...band].reverse()) pen.lineTo(left + x, place(least));
    pen.fill();
    pen.globalAlpha = 1;
    pen.strokeStyle = accent;
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (const { x, mean } of band) pen.lineTo(left + x, place(mean));
    pen.stroke();
  }

  pointAt(offset) {
    if (!this.scale || this.scale.empty) return;
    const { left, right, from, to } = this.scale;
    const share = Math.min(1, Math.max(0, (offset - left) / (right - left)));
    this.view.moveCross(from + share * (to - from), this);
  }

  key(event) {
    const { from, to } = this.scale ?? {};
    const first = this.series.values().next().value;
    if (!first || from === undefined) return;
    const stride = Math.max((to - from) / 100, first.length > 1 ? Math.abs(first.x[1] - first.x[0]) : 1);
    const at = this.view.cross ?? to;
    const goal = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: from, End: to }[event.key];
    if (event.key === "Escape" && this.view.cross !== null) {
      event.stopPropagation();
      this.view.moveCross(null);
    }
    if (goal === undefined) return;
    event.preventDefault();
    this.view.moveCross(Math.min(to, Math.max(from, goal)), this);
    this.view.announce(this.reading(), true);
  }

  /** The nearest values of every rank: the step they belong to, and `[[rank, value]]`. */
  values(x) {
    let step = null;
    const near = [];
    for (const [rank, one] of this.series) {
      const point = one.nearest(x);
      if (!point) continue;
      near.push([rank, ...point]);
      if (step === null || Math.abs(point[0] - x) < Math.abs(step - x)) step = point[0];
    }
    return { step, values: near.map(([rank, , value]) => [rank, value]) };
  }

  reading() {
    const { step, values } = this.values(this.view.cross);
    if (!this.banded) return `${this.name}, step ${number(step)}: ${values.map(([rank, value]) => `rank ${rank} ${number(value)}`).join(", ")}`;
    const { mean, least, most } = spread(values);
    return `${this.name}, step ${number(step)}: mean ${number(mean)}, from ${number(least[1])} (rank ${least[0]}) to ${number(most[1])} (rank ${most[0]})`;
  }

  drawCross() {
    const { cross, pointed } = this.view;
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
    this.cross.style.left = `${x}px`;
    say(this.value, number(spread(values).mean));
    if (pointed !== this) return;
    this.fillTip(step, values);
    this.tip.style.left = x > this.width / 2 ? "auto" : `${x + 14}px`;
    this.tip.style.right = x > this.width / 2 ? `${this.width - x + 14}px` : "auto";
  }

  fillTip(step, values) {
    const rows = [div("anb-tip-step", `step ${number(step)}`)];
    if (this.banded || values.length > 12) {
      const { mean, least, most } = spread(values);
      rows.push(tipRow("mean", mean), tipRow(`least · rank ${least[0]}`, least[1]), tipRow(`most · rank ${most[0]}`, most[1]));
    } else for (const [rank, value] of values) rows.push(tipRow(span(`anb-rank anb-r${rank % 8}`, String(rank)), value));
    this.tip.replaceChildren(...rows);
  }
}

const tipRow = (label, value) => div("anb-tip-row", span("", label), span("anb-tip-value", number(value)));

/** Mean, and the least and most of `[[rank, value]]`; what is not finite counts for nothing where something else is. */
export function spread(values) {
  const finite = values.filter(([, value]) => Number.isFinite(value));
  const use = finite.length ? finite : values;
  const mean = use.reduce((sum, [, value]) => sum + value, 0) / use.length;
  const least = use.reduce((a, b) => (b[1] < a[1] ? b : a), use[0]);
  const most = use.reduce((a, b) => (b[1] > a[1] ? b : a), use[0]);
  return { mean, least, most };
}

/** What the columns of several ranks make together: `[{x, least, most, mean}]`. */
export function bandOf(ranks) {
  const band = [];
  for (let x = 0; x < (ranks[0]?.length ?? 0); x++) {
    let [least, most, sum, here] = [Infinity, -Infinity, 0, 0];
    for (const columnsOfRank of ranks) {
      const one = columnsOfRank[x];
      if (!one) continue;
      if (one.least < least) least = one.least;
      if (one.most > most) most = one.most;
      sum += one.sum / one.points;
      here++;
    }
    if (here) band.push({ x, least, most, mean: sum / here });
  }
  return band;
}

// ------------------------------------------------------------------------------------------------------- pieces of the view

/** A part of the panel that folds: its head is a button. */
function section(name, title, tools, ...content) {
  const body = div(`anb-body anb-${name}-body`, ...content);
  const head = h("button", { type: "button", class: "anb-fold", "aria-expanded": "true" }, h("span", { class: "anb-chevron", "aria-hidden": "true" }), title);
  head.addEventListener("click", () => {
    const open = head.getAttribute("aria-expanded") !== "true";
    set(head, "aria-expanded", open);
    show(body, open);
    show(tools, open);
  });
  const element = h("div", { class: `anb-section anb-${name}`, role: "region", "aria-label": title }, div("anb-section-head", head, tools), body);
  return { element, body };
}

/** A button that unfolds what stands under it. */
function folded(label, ...content) {
  const inside = div("anb-folded", ...content);
  inside.hidden = true;
  const head = h("button", { type: "button", class: "anb-unfold", "aria-expanded": "false" }, h("span", { class: "anb-chevron", "aria-hidden": "true" }), label);
  head.addEventListener("click", () => {
    const open = head.getAttribute("aria-expanded") !== "true";
    set(head, "aria-expanded", open);
    show(inside, open);
  });
  return div("anb-foldable", head, inside);
}

function chip() {
  const [symbol, text] = [h("span", { class: "anb-symbol", "aria-hidden": "true" }), span("")];
  const element = span("anb-chip", symbol, text);
  return {
    element,
    set(state) {
      if (element.dataset.state === state) return;
      element.dataset.state = state;
      say(symbol, SYMBOLS[state] ?? "•");
      say(text, state);
    },
  };
}

/** A small bar with its text: `role="meter"`. */
function meter(label) {
  const fill = div("anb-fill");
  const bar = h("div", { class: "anb-meter", role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, fill);
  return {
    element: bar,
    set(share, text) {
      const percent = Math.round(Math.min(1, Math.max(0, share)) * 100);
      fill.style.transform = `scaleX(${percent / 100})`;
      set(bar, "aria-valuenow", percent);
      set(bar, "aria-valuetext", text);
      bar.classList.toggle("anb-hot", share > 0.9);
    },
  };
}

/** How far a rank is: its newest open bar, and the one around it. */
export function progressOf(known) {
  const bars = [...known.bars.values()];
  const open = bars.filter((bar) => !bar.closed);
  const bar = open.at(-1) ?? bars.at(-1);
  return { bar, around: open.length > 1 ? open.at(-2) : null };
}

export function progressText(bar, moving = true) {
  const parts = [`${count(bar.done)}${bar.total === null || bar.total === undefined ? ` ${bar.unit}` : `/${count(bar.total)}`}`];
  if (bar.rate) parts.push(bar.rate >= 1 ? `${bar.rate.toFixed(bar.rate < 100 ? 1 : 0)} ${bar.unit}/s` : `${(1 / bar.rate).toFixed(1)} s/${bar.unit}`);
  if (moving && bar.rate && bar.total && !bar.closed && bar.done < bar.total) parts.push(`${duration((bar.total - bar.done) / bar.rate)} left`);
  return parts.join(" · ");
}

const shareOf = (bar) => (bar?.total ? Math.min(1, bar.done / bar.total) : bar?.closed ? 1 : 0);

/** A rank's row in the table of ranks. */
class RankRow {
  constructor(rank, pick) {
    this.rank = rank;
    this.chip = chip();
    this.fill = div("anb-fill");
    this.label = span("anb-bar-label");
    this.text = span("anb-bar-text");
    this.bar = h(
      "div",
      { class: "anb-bar", role: "progressbar", "aria-label": `rank ${rank} progress`, "aria-valuemin": 0, "aria-valuemax": 100 },
      this.fill, this.label, this.text,
    );
    this.metrics = [];
    this.busy = meter(`rank ${rank} device utilisation`);
    this.memory = meter(`rank ${rank} device memory`);
    this.busyText = span("anb-num");
    this.memoryText = span("anb-num");
    this.device = span("anb-device");
    this.name = h(
      "button",
      { type: "button", class: `anb-rank anb-rank-btn anb-r${rank % 8}`, onclick: pick, title: `show the output of rank ${rank}`, "aria-label": `rank ${rank}: show its output` },
      String(rank),
    );
    const cell = (name, ...inside) => h("div", { class: `anb-cell ${name}`, role: "cell" }, ...inside);
    this.metricsAt = cell("anb-device-cell", this.device, this.busy.element, this.busyText, this.memory.element, this.memoryText);
    this.element = h(
      "div",
      { class: "anb-row", role: "row" },
      h("div", { class: "anb-cell", role: "rowheader" }, this.name), cell("", this.chip.element), cell("anb-bar-cell", this.bar), this.metricsAt,
    );
  }

  draw(known, names) {
    this.chip.set(known.state);
    set(this.chip.element, "title", known.detail || known.state);
    this.drawBar(known);
    this.drawMetrics(known, names);
    this.drawDevice(known);
  }

  drawBar(known) {
    const { bar, around } = progressOf(known);
    this.bar.classList.toggle("anb-none", !bar);
    this.bar.classList.toggle("anb-endless", Boolean(bar && !bar.total && !bar.closed));
    const outer = around ? `${around.label} ${progressText({ ...around, rate: null })} · ` : "";
    say(this.label, bar ? `${outer}${[bar.label, bar.note].filter(Boolean).join(" · ")}` : known.detail);
    say(this.text, bar ? progressText(bar, !OVER.has(known.state)) : "");
    this.fill.style.transform = `scaleX(${shareOf(bar).toFixed(4)})`;
    set(this.bar, "aria-valuenow", Math.round(shareOf(bar) * 100));
    set(this.bar, "aria-valuetext", bar ? `${bar.label} ${progressText(bar)}` : known.detail || known.state);
  }

  drawMetrics(known, names) {
    while (this.metrics.length < names.length) {
      const cell = h("div", { class: "anb-cell anb-num anb-metric", role: "cell" });
      this.metrics.push(cell);
      this.element.insertBefore(cell, this.metricsAt);
    }
    names.forEach((name, i) => {
      const value = known.newest.get(name);
      say(this.metrics[i], number(value));
      set(this.metrics[i], "data-name", name);
      this.metrics[i].classList.toggle("anb-bad", value !== undefined && !Number.isFinite(value));
    });
  }

  drawDevice(known) {
    const device = known.devices.values().next().value;
    show(this.metricsAt, Boolean(device));
    if (!device) return;
    say(this.device, device.device + (known.devices.size > 1 ? ` +${known.devices.size - 1}` : ""));
    const [busy, used, total] = [device.utilisation, device.used, device.total];
    const busyKnown = busy !== null && busy !== undefined;
    show(this.busy.element, busyKnown);
    say(this.busyText, busyKnown ? `${Math.round(busy)} %` : "");
    if (busyKnown) this.busy.set(busy / 100, `${Math.round(busy)} %`);
    this.busy.element.classList.remove("anb-hot"); // a busy device is a good thing
    const memory = used === null || used === undefined ? "" : total ? ofBytes(used, total) : bytes(used);
    show(this.memory.element, Boolean(total));
    say(this.memoryText, total && used / total > 0.9 ? `⚠ ${memory}` : memory);
    if (total) this.memory.set(used / total, memory);
  }
}

/** The error that leads: its sentence, the person's own lines, what to do, and what the others said. */
function failureView(failure, announce) {
  const traceback = h("pre", { class: "anb-pre", tabindex: "0", role: "group", "aria-label": "traceback" }, plain(failure.traceback || ""));
  const others = failure.others ?? [];
  const lines = failure.last_lines ?? [];
  return h(
    "div",
    { class: "anb-failure", role: "region", "aria-label": "The error" },
    div(
      "anb-failure-head",
      span(`anb-rank anb-r${failure.rank % 8}`, `rank ${failure.rank}`),
      span("anb-failure-type", failure.type),
      span("anb-failure-message", failure.message),
    ),
    failure.advice ? div("anb-advice", h("span", { class: "anb-advice-mark", "aria-hidden": "true" }, "→"), span("", failure.advice)) : null,
    ...frameRuns(failure.frames ?? []),
    lines.length ? div("anb-last", div("anb-caption", "Its last lines"), h("pre", { class: "anb-pre", tabindex: "0", role: "group", "aria-label": "last lines" }, lines.map(plain).join("\n"))) : null,
    others.length ? div("anb-others", div("anb-caption", "The other ranks"), ...others.map((text) => div("anb-other", text))) : null,
    failure.traceback ? folded("Whole traceback", traceback, copyButton("Copy", () => plain(failure.traceback), announce)) : null,
  );
}

/** Own frames stand open; frames of others that follow each other are folded into one line. */
function frameRuns(frames) {
  const parts = [];
  let strange = [];
  const guilty = [...frames].reverse().find((frame) => frame[3]);
  const fold = () => {
    if (strange.length) parts.push(folded(`${strange.length} ${strange.length === 1 ? "call" : "calls"} in other code`, ...strange.map(frameView)));
    strange = [];
  };
  for (const frame of frames) {
    if (!frame[3]) strange.push(frame);
    else {
      fold();
      parts.push(frameView(frame));
      parts.at(-1).classList.toggle("anb-guilty", frame === guilty);
    }
  }
  fold();
  return parts;
}

function frameView([place, name, source, own]) {
  return div(
    own ? "anb-frame anb-own" : "anb-frame",
    div("anb-frame-place", span("anb-place", place), name ? span("anb-in", ` in ${name}`) : null),
    source ? h("code", { class: "anb-source" }, source) : null,
  );
}

/** The ranks' stacks; those that are elsewhere than the others stand out. */
export function stackBlocks(text) {
  const blocks = [];
  for (const line of text.split("\n")) {
    if (/^rank \d+/.test(line) || !blocks.length) blocks.push({ odd: line.includes("◀"), lines: [] });
    blocks.at(-1).lines.push(line);
  }
  return blocks;
}

function stacksView(text) {
  return stackBlocks(text).map(({ odd, lines }) =>
    div(odd ? "anb-stack anb-odd" : "anb-stack", div("anb-stack-head", lines[0]), lines.length > 1 ? h("div", { class: "anb-stack-lines" }, lines.slice(1).join("\n")) : null),
  );
}

// -------------------------------------------------------------------------------------------------------------------- view

/** One panel in the page. `send` is null where there is no kernel. */
class View {
  constructor(store, send) {
    this.store = store;
    this.send = send;
    this.id = Math.random().toString(36).slice(2, 10);
    this.band = null; // until ranks are known
    this.bandChosen = false;
    this.cross = null;
    this.pointed = null;
    this.palette = { key: "" };
    this.turn = 0;
    this.restUntil = 0;
    this.rows = new Map();
    this.cells = new Map();
    this.charts = new Map();
    this.logs = new Map(); // "all" or rank, in one place or in the grid -> LogView
    this.chosen = "all";
    this.side = false;
    this.settings = { query: "", only: false, times: false };
    this.stopPressed = 0;
    this.seen = { epoch: store.epoch, changes: -1, state: null, failure: null, stacks: store.stacks, tabs: "" };
    this.build();
    this.watch();
  }

  // ------------------------------------------------------------------------------------------------------------- building

  build() {
    this.live = h("div", { class: "anb-sr", role: "status", "aria-live": "polite" });
    this.root = h(
      "div",
      { class: "anb", role: "region", "aria-label": "Distributed run", "data-lm-suppress-shortcuts": "true", "data-jp-suppress-context-menu": "true" },
      div("anb-inner", this.buildHead(), this.buildNotices(), div("anb-top", this.buildRanks(), this.buildCharts()), this.buildLogs(), this.live),
    );
    for (const kind of ["keydown", "keyup", "keypress"]) this.root.addEventListener(kind, (event) => event.stopPropagation());
    this.root.addEventListener("keydown", (event) => event.key === "Escape" && this.leave());
  }

  buildHead() {
    this.name = h("span", { class: "anb-name", role: "heading", "aria-level": "3" });
    this.chip = chip();
    this.time = h("span", { class: "anb-elapsed", title: "elapsed" });
    this.facts = span("anb-facts");
    this.why = span("anb-why");
    this.notes = span("anb-notes");
    this.stop = button("anb-stop", "Stop", () => this.pressStop());
    this.askStacks = button("", "Stacks", () => this.pressStacks(), { title: "Where is every rank at this moment?" });
    this.pause = button("", "Pause", () => this.pressPause(), { title: "The run goes on; this panel stands still" });
    this.buttons = div("anb-buttons", this.pause, this.askStacks, this.stop);
    return div(
      "anb-head",
      div("anb-title", this.name, this.chip.element, this.time, span("anb-space"), this.buttons),
      div("anb-sub", this.facts, this.why, this.notes),
    );
  }

  buildNotices() {
    this.quietText = span("anb-quiet-text");
    this.quietStacks = button("", "Stacks", () => this.pressStacks());
    this.quiet = h(
      "div",
      { class: "anb-quiet", role: "region", "aria-label": "Nothing has come for a while" },
      h("span", { class: "anb-quiet-mark", "aria-hidden": "true" }, "⚠"), this.quietText, this.quietStacks,
    );
    this.failure = div("anb-failure-place");
    this.stacksText = h("div", { class: "anb-stacks-text", tabindex: "0", role: "group", "aria-label": "stacks of every rank" });
    this.stacks = h(
      "div",
      { class: "anb-stacks", role: "region", "aria-label": "Stacks", onkeydown: (event) => event.key === "Escape" && this.closeStacks(event) },
      div(
        "anb-section-head",
        span("anb-caption", "Where every rank is"), span("anb-space"),
        copyButton("Copy", () => this.store.stacks?.text ?? "", (text) => this.announce(text)),
        button("anb-quiet-btn", "Close", (event) => this.closeStacks(event)),
      ),
      this.stacksText,
    );
    for (const one of [this.quiet, this.failure, this.stacks]) show(one, false);
    return div("anb-notices", this.quiet, this.failure, this.stacks);
  }

  buildRanks() {
    this.strip = h("div", { class: "anb-strip", role: "group", "aria-label": "all ranks", onkeydown: (event) => this.stripKey(event) });
    this.header = h("div", { class: "anb-row anb-header", role: "row" });
    this.table = h("div", { class: "anb-table", role: "table", "aria-label": "ranks" }, this.header);
    this.tableBox = div("anb-table-box", this.table);
    this.tableBox.addEventListener("scroll", () => this.drawRanks());
    this.host = h("div", { class: "anb-host", role: "group", "aria-label": "this machine" });
    const part = section("ranks", "Ranks", div("anb-tools"), this.strip, this.tableBox, this.host);
    this.hostMeters = new Map();
    return part.element;
  }

  buildCharts() {
    this.bandButton = button("anb-quiet-btn", "Band", () => this.toggleBand(), { "aria-pressed": "false", title: "mean and range of all ranks, instead of a line for each" });
    this.tableButton = button("anb-quiet-btn", "Table", () => this.toggleTable(), { "aria-pressed": "false", title: "the numbers as a table" });
    this.grid = div("anb-charts");
    this.numbers = h("div", { class: "anb-numbers", tabindex: "0", role: "group", "aria-label": "numbers of the charts" });
    show(this.numbers, false);
    const part = section("metrics", "Metrics", div("anb-tools", this.bandButton, this.tableButton), this.grid, this.numbers);
    this.metricsPart = part.element;
    show(part.element, false);
    return part.element;
  }

  buildLogs() {
    this.tabs = h("div", { class: "anb-tabs", role: "tablist", "aria-label": "whose output", onkeydown: (event) => this.tabKey(event) });
    this.select = h("select", { class: "anb-select", "aria-label": "whose output", onchange: () => this.pick(this.select.value === "all" ? "all" : Number(this.select.value)) });
    this.search = h("input", {
      class: "anb-search", type: "search", placeholder: "Search", "aria-label": "search in the output",
      oninput: () => this.configure({ query: this.search.value.toLowerCase() }), onkeydown: (event) => this.searchKey(event),
    });
    this.found = h("span", { class: "anb-found", role: "status", "aria-live": "polite" });
    this.previous = button("anb-mini", "↑", () => this.step(-1), { "aria-label": "previous match", title: "previous match (Shift+Enter)" });
    this.next = button("anb-mini", "↓", () => this.step(1), { "aria-label": "next match", title: "next match (Enter)" });
    this.only = button("anb-quiet-btn", "Only matches", () => this.configure({ only: !this.settings.only }), { "aria-pressed": "false" });
    this.times = button("anb-quiet-btn", "Times", () => this.configure({ times: !this.settings.times }), { "aria-pressed": "false", title: "when each line was written" });
    this.sideButton = button("anb-quiet-btn", "Side by side", () => this.toggleSide(), { "aria-pressed": "false" });
    this.followButton = button("anb-quiet-btn", "Follow", () => this.toggleFollow(), { "aria-pressed": "true", title: "keep the newest line in sight" });
    this.copy = copyButton("Copy", () => this.shown().map((log) => log.text()).join("\n"), (text) => this.announce(text));
    this.file = button("anb-quiet-btn", "Whole file", () => this.askFile(this.oneRank), { title: "save everything this rank has written" });
    this.panel = h("div", { class: "anb-output", id: `anb-${this.id}-output`, role: "tabpanel" });
    const tools = div(
      "anb-tools",
      div("anb-searching", this.search, this.previous, this.next, this.found), this.only,
      span("anb-space"), this.times, this.sideButton, this.followButton, this.copy, this.file,
    );
    return section("output", "Output", div("anb-tools anb-whose", this.tabs, this.select), tools, this.panel).element;
  }

  watch() {
    this.visible = true;
    this.sight = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.target === this.root) this.visible = entry.isIntersecting;
        else if (entry.target.anbChart) entry.target.anbChart.visible = entry.isIntersecting;
      }
      if (this.visible) this.draw();
    });
    this.sight.observe(this.root);
    this.resized = new ResizeObserver(() => this.sized());
    this.resized.observe(this.panel);
    this.resized.observe(this.grid);
    this.themed = new MutationObserver(() => this.readTheme());
    for (const place of [document.documentElement, document.body]) this.themed.observe(place, { attributes: true });
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.onScheme = () => this.readTheme();
    this.scheme.addEventListener("change", this.onScheme);
    this.timer = setInterval(() => this.tick(), PAINT);
  }

  sized() {
    for (const chart of this.charts.values()) chart.measure();
    for (const log of this.shown()) log.measure();
    this.draw();
  }

  close() {
    clearInterval(this.timer);
    this.scheme.removeEventListener("change", this.onScheme);
    for (const observer of [this.sight, this.resized, this.themed]) observer.disconnect();
    this.store.views.delete(this);
    this.root.remove();
  }

  /** Light or dark is read from the colour that stands behind the panel, whatever the notebook calls its themes. */
  readTheme() {
    if (!this.root.isConnected) return;
    const probe = h("span", { style: "color:var(--anb-bg)" });
    this.root.append(probe);
    const [red, green, blue] = pixel(getComputedStyle(probe).color);
    probe.remove();
    set(this.root, "data-anb-theme", 0.299 * red + 0.587 * green + 0.114 * blue < 128 ? "dark" : "light");
    const style = getComputedStyle(this.root);
    const read = (name) => style.getPropertyValue(name).trim();
    const ranks = Array.from({ length: 8 }, (_, i) => read(`--anb-c${i}`));
    const resolve = (name) => this.resolved(name);
    const [accent, dim, grid] = [resolve("--anb-accent"), resolve("--anb-dim"), resolve("--anb-line")];
    this.palette = { ranks, accent, dim, grid, font: style.fontFamily, key: [accent, dim, grid, ranks[0]].join() };
    for (const chart of this.charts.values()) chart.draw();
  }

  resolved(name) {
    const probe = h("span", { style: `color:var(${name})` });
    this.root.append(probe);
    const colour = getComputedStyle(probe).color;
    probe.remove();
    return colour;
  }

  // -------------------------------------------------------------------------------------------------------------- buttons

  tell(message) {
    this.send?.(message);
  }

  pressStop() {
    if (this.stop.dataset.step === "kill") {
      this.tell({ do: "kill" });
      say(this.stop, "Killing…");
      this.stop.disabled = true;
      return;
    }
    this.tell({ do: "stop" });
    this.announce("Stopping");
    this.stopPressed = performance.now();
    this.draw();
  }

  // A second press kills; for a second after the first one it waits, so that a double click does not.
  drawStop() {
    const over = OVER.has(this.store.state.state);
    show(this.stop, !over);
    if (over || this.stop.textContent === "Killing…") return;
    const asked = this.stopPressed > 0 || this.store.state.state === "stopping";
    const waits = asked && performance.now() - this.stopPressed < 1000 && this.stopPressed > 0;
    const keep = document.activeElement === this.stop;
    say(this.stop, !asked ? "Stop" : waits ? "Stopping…" : "Kill");
    set(this.stop, "data-step", asked && !waits ? "kill" : "stop");
    set(this.stop, "title", asked ? "Ends every process at once" : "Asks every rank to end at its next step");
    if (this.stop.disabled !== waits) this.stop.disabled = waits;
    if (keep && !waits) this.stop.focus({ preventScroll: true });
  }

  pressStacks() {
    this.store.stacksAsked = true;
    this.stacksFrom = document.activeElement;
    this.tell({ do: "stacks" });
    this.announce("Asked every rank where it is");
    this.draw();
  }

  closeStacks(event) {
    event.stopPropagation();
    show(this.stacks, false);
    (this.stacksFrom?.isConnected ? this.stacksFrom : this.askStacks).focus();
  }

  pressPause() {
    this.store.following = !this.store.following;
    this.tell({ do: "follow", on: this.store.following });
    this.announce(this.store.following ? "Following the run" : "The panel stands still");
    this.draw();
  }

  askFile(rank) {
    this.tell({ do: "log", rank });
    this.announce(`Asked for the whole output of rank ${rank}`);
  }

  /** Escape gives the keyboard back to the notebook. */
  leave() {
    const notebook = this.root.closest(".jp-Notebook");
    if (notebook) notebook.focus();
    else document.activeElement?.blur?.();
  }

  announce(text, again = false) {
    if (again) this.live.textContent = "";
    say(this.live, text);
  }

  // ------------------------------------------------------------------------------------------------------------------ logs

  get many() {
    return this.store.ranks.size > FEW_RANKS;
  }

  log(which, place) {
    const key = `${place}-${which}`;
    let log = this.logs.get(key);
    if (!log) {
      const all = which === "all";
      const known = () => this.store.ranks.get(which);
      log = new LogView({
        ring: () => (all ? this.store.all : (known()?.ring ?? this.store.all)),
        open: () => (all ? openLines(this.store) : [...(known()?.open.values() ?? [])]),
        showRank: () => all && this.store.ranks.size > 1,
        label: all ? "output of all ranks" : `output of rank ${which}`,
        changed: () => this.drawLogTools(),
      });
      Object.assign(log, this.settings);
      this.logs.set(key, log);
    }
    return log;
  }

  /** The logs that are on the page now. */
  shown() {
    return this.side ? [...this.store.ranks.keys()].map((rank) => this.log(rank, "side")) : [this.log(this.chosen, "one")];
  }

  configure(changes) {
    Object.assign(this.settings, changes);
    set(this.only, "aria-pressed", this.settings.only);
    set(this.times, "aria-pressed", this.settings.times);
    for (const log of this.logs.values()) log.configure(this.settings);
    this.drawLogTools();
  }

  pick(which) {
    this.chosen = which;
    this.side = false;
    this.placeLogs();
  }

  toggleSide() {
    this.side = !this.side;
    this.placeLogs();
  }

  toggleFollow() {
    const follow = !this.shown().every((log) => log.follow);
    for (const log of this.shown()) {
      if (follow) log.toNewest();
      else log.follow = false;
      log.draw();
    }
    this.followButton.focus();
    this.drawLogTools();
  }

  placeLogs() {
    this.panel.classList.toggle("anb-side", this.side);
    this.panel.replaceChildren(
      ...this.shown().map((log, i) => (this.side ? this.sideBox(log, [...this.store.ranks.keys()][i]) : log.element)),
    );
    this.drawTabs();
    for (const log of this.shown()) log.draw();
    this.drawLogTools();
  }

  sideBox(log, rank) {
    const file = this.send ? button("anb-mini", "⤓", () => this.askFile(rank), { "aria-label": `whole file of rank ${rank}`, title: "whole file" }) : null;
    return div("anb-side-box", div("anb-side-head", span(`anb-rank anb-r${rank % 8}`, String(rank)), `rank ${rank}`, span("anb-space"), file), log.element);
  }

  choices() {
    return ["all", ...this.store.ranks.keys()];
  }

  drawTabs() {
    const choices = this.choices();
    const key = choices.join();
    show(this.tabs, !this.many && choices.length > 2);
    show(this.select, this.many);
    if (key !== this.seen.tabs) {
      this.seen.tabs = key;
      this.select.replaceChildren(...choices.map((one) => h("option", { value: one }, one === "all" ? "All ranks" : `Rank ${one}`)));
      this.tabs.replaceChildren(...(this.many ? [] : choices.map((one) => this.tab(one))));
    }
    this.select.value = String(this.chosen);
    [...this.tabs.children].forEach((tab, i) => {
      const here = choices[i] === this.chosen && !this.side;
      set(tab, "aria-selected", here);
      tab.tabIndex = choices[i] === this.chosen ? 0 : -1;
    });
    const named = this.tabs.hidden ? null : this.tabs.children[choices.indexOf(this.chosen)];
    if (named && !this.side) {
      set(this.panel, "role", "tabpanel");
      set(this.panel, "aria-labelledby", named.id);
      this.panel.removeAttribute("aria-label");
    } else {
      set(this.panel, "role", "group");
      this.panel.removeAttribute("aria-labelledby");
      set(this.panel, "aria-label", "output");
    }
  }

  tab(which) {
    return h(
      "button",
      {
        type: "button", role: "tab", class: which === "all" ? "anb-tab" : `anb-tab anb-r${which % 8}`, id: `anb-${this.id}-tab-${which}`,
        "aria-controls": `anb-${this.id}-output`, "aria-label": which === "all" ? "all ranks" : `rank ${which}`, onclick: () => this.pick(which),
      },
      which === "all" ? "All ranks" : String(which),
    );
  }

  tabKey(event) {
    const choices = this.choices();
    const here = choices.indexOf(this.chosen);
    const goal = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: choices.length - 1 }[event.key];
    if (goal === undefined) return;
    event.preventDefault();
    const next = (goal + choices.length) % choices.length;
    this.pick(choices[next]);
    this.tabs.children[next].focus();
  }

  searchKey(event) {
    if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") {
      event.stopPropagation();
      if (this.search.value) {
        this.search.value = "";
        this.configure({ query: "" });
      } else this.shown()[0]?.scroller.focus();
    }
  }

  /** Goes to the next (1) or the previous (-1) match, through all logs that are shown. */
  step(by) {
    const all = this.shown().flatMap((log) => log.matches.map((line, index) => ({ log, line, index })));
    if (!all.length) return;
    const here = all.findIndex(({ log, line }) => log === this.foundIn && log.current === line);
    const next = all[here < 0 ? (by > 0 ? 0 : all.length - 1) : (here + by + all.length) % all.length];
    if (this.foundIn && this.foundIn !== next.log) this.foundIn.current = null;
    this.foundIn = next.log;
    next.log.goTo(next.index);
    next.log.element.scrollIntoView({ block: "nearest" });
  }

  drawLogTools() {
    const logs = this.shown();
    const total = logs.reduce((sum, log) => sum + log.matches.length, 0);
    let at = 0;
    for (const log of logs) {
      const index = log === this.foundIn && log.current !== null ? log.matches.indexOf(log.current) : -1;
      if (index >= 0) {
        at += index + 1;
        break;
      }
      at = log === logs.at(-1) ? 0 : at + log.matches.length;
    }
    const query = this.settings.query;
    say(this.found, !query ? "" : at && this.foundIn?.current !== null ? `${count(at)} of ${count(total)}` : total === 1 ? "1 match" : `${count(total)} matches`);
    this.previous.disabled = this.next.disabled = !total;
    set(this.followButton, "aria-pressed", logs.every((log) => log.follow));
    set(this.sideButton, "aria-pressed", this.side);
    show(this.sideButton, this.store.ranks.size > 1);
    show(this.file, this.canAct && !this.side && this.oneRank !== null);
  }

  /** The rank whose output alone is shown, or null. */
  get oneRank() {
    if (this.chosen !== "all") return this.chosen;
    return this.store.ranks.size === 1 ? this.store.ranks.keys().next().value : null;
  }

  get canAct() {
    return Boolean(this.send) && this.store.run.can_act;
  }

  // ---------------------------------------------------------------------------------------------------------------- charts

  toggleBand() {
    this.band = !this.band;
    this.bandChosen = true;
    set(this.bandButton, "aria-pressed", this.band);
    for (const chart of this.charts.values()) chart.draw(true);
  }

  toggleTable() {
    const table = this.tableButton.getAttribute("aria-pressed") !== "true";
    set(this.tableButton, "aria-pressed", table);
    show(this.grid, !table);
    show(this.numbers, table);
    this.draw();
  }

  moveCross(x, chart = null) {
    this.cross = x;
    this.pointed = chart;
    for (const one of this.charts.values()) if (one.visible) one.drawCross();
  }

  drawCharts() {
    const { metrics, ranks } = this.store;
    show(this.metricsPart, metrics.size > 0);
    show(this.bandButton, ranks.size > 1);
    if (!this.bandChosen && this.band !== ranks.size > FEW_LINES_IN_A_CHART) {
      this.band = ranks.size > FEW_LINES_IN_A_CHART;
      set(this.bandButton, "aria-pressed", this.band);
    }
    for (const name of metrics.keys()) {
      if (this.charts.has(name)) continue;
      const chart = new Chart(name, this);
      chart.plot.anbChart = chart;
      this.sight.observe(chart.plot);
      this.resized.observe(chart.plot);
      this.charts.set(name, chart);
      this.grid.append(chart.element);
    }
    if (!this.numbers.hidden) this.drawNumbers();
    else {
      for (const chart of this.charts.values()) {
        if (chart.visible && chart.drawn) chart.tellNews();
        else if (chart.visible) chart.draw();
      }
    }
  }

  /** In turn, and only for so long at a time: with many charts each one waits a little rather than the person. */
  paintCharts() {
    const charts = [...this.charts.values()].filter((chart) => chart.visible);
    const until = performance.now() + CHART_TIME;
    for (let i = 0; i < charts.length; i++) {
      if (performance.now() > until) {
        this.seen.changes = -1; // the others at the next tick
        return;
      }
      charts[this.turn++ % charts.length].paintNews();
    }
  }

  /** The table that says what the charts show. */
  drawNumbers() {
    const cell = (role, text, name = "anb-num") => h("div", { class: `anb-cell ${name}`, role }, text);
    const rows = [...this.store.metrics].flatMap(([name, series]) => [...series].map(([rank, one]) => [name, rank, one]));
    const row = (...cells) => h("div", { class: "anb-row", role: "row" }, ...cells);
    const head = row(...["metric", "rank", "newest", "least", "most", "last step", "values"].map((text, i) => cell("columnheader", text, i ? "anb-num" : "")));
    head.classList.add("anb-header");
    const body = rows.map(([name, rank, one]) =>
      row(
        cell("rowheader", name, ""), cell("cell", String(rank)), cell("cell", number(one.last?.[1])),
        cell("cell", number(one.least)), cell("cell", number(one.most)), cell("cell", number(one.last?.[0])), cell("cell", count(one.came)),
      ),
    );
    const table = h("div", { class: "anb-table anb-numbers-table", role: "table", "aria-label": "metrics" }, head, ...body);
    const text = table.textContent;
    if (text !== this.numbers.textContent) this.numbers.replaceChildren(table);
  }

  // ----------------------------------------------------------------------------------------------------------------- ranks

  drawRanks() {
    const { ranks, metrics } = this.store;
    const names = [...metrics.keys()].slice(0, 3);
    this.drawHeader(names);
    show(this.strip, this.many);
    this.tableBox.classList.toggle("anb-scrolls", this.many);
    set(this.tableBox, "tabindex", this.many ? 0 : -1);
    // of many rows only those in sight are painted
    const first = this.many ? Math.floor(this.tableBox.scrollTop / ROW) - 2 : 0;
    let place = 0;
    for (const [rank, known] of ranks) {
      let row = this.rows.get(rank);
      if (!row) {
        row = new RankRow(rank, () => this.pick(rank));
        this.rows.set(rank, row);
        this.table.append(row.element);
        row.draw(known, names);
      } else if (place >= first && place < first + 16) row.draw(known, names);
      place++;
      if (this.many) this.drawCell(rank, known);
    }
  }

  drawHeader(names) {
    const devices = [...this.store.ranks.values()].some((known) => known.devices.size);
    const titles = ["", "state", "progress", ...names, ...(devices ? ["device"] : [])];
    if (this.header.dataset.titles === titles.join()) return;
    this.header.dataset.titles = titles.join();
    this.table.style.setProperty("--anb-columns", `auto auto minmax(0, 1fr) repeat(${Math.max(names.length, 1)}, auto) auto`);
    this.table.classList.toggle("anb-no-metrics", !names.length);
    this.header.replaceChildren(
      ...titles.map((title, i) =>
        h(
          "div",
          { class: names.includes(title) && i > 2 ? "anb-cell anb-num anb-metric-name" : "anb-cell", role: "columnheader", title },
          title || span("anb-sr", "rank"),
        ),
      ),
    );
  }

  drawCell(rank, known) {
    let cell = this.cells.get(rank);
    if (!cell) {
      cell = h("button", { type: "button", class: "anb-heat", tabindex: this.cells.size ? -1 : 0, onclick: () => this.pick(rank) }, div("anb-heat-fill"), span("anb-heat-text"));
      this.cells.set(rank, cell);
      this.strip.append(cell);
    }
    const share = shareOf(progressOf(known).bar);
    cell.dataset.state = known.state;
    cell.firstChild.style.transform = `scaleY(${share.toFixed(3)})`;
    say(cell.lastChild, known.state === "running" ? String(rank) : `${SYMBOLS[known.state] ?? ""}${rank}`);
    const text = `rank ${rank}: ${known.state}, ${Math.round(share * 100)} %`;
    set(cell, "aria-label", text);
    set(cell, "title", text);
    cell.classList.toggle("anb-chosen", rank === this.chosen);
  }

  stripKey(event) {
    const cells = [...this.strip.children];
    const here = cells.indexOf(document.activeElement);
    const goal = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: cells.length - 1 }[event.key];
    if (goal === undefined || here < 0) return;
    event.preventDefault();
    const next = cells[(goal + cells.length) % cells.length];
    cells[here].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  drawHost() {
    for (const [name, used, total, unit] of this.store.host) {
      let one = this.hostMeters.get(name);
      if (!one) {
        one = { meter: meter(name), text: span("anb-num") };
        this.hostMeters.set(name, one);
        this.host.append(div("anb-host-one", span("anb-host-name", name === "cpu" ? "CPU" : name), one.meter.element, one.text));
      }
      const share = total ? used / total : 0;
      const text = unit === "%" ? `${Math.round(used)} %` : ofBytes(used, total);
      one.meter.set(share, text);
      say(one.text, share > 0.9 ? `⚠ ${text}` : text);
    }
    show(this.host, this.store.host.length > 0);
  }

  // ------------------------------------------------------------------------------------------------------------- painting

  tick() {
    this.acknowledge();
    if (document.hidden || !this.root.isConnected || !this.visible) return;
    if (this.store.changes !== this.seen.changes) {
      const from = performance.now();
      if (from < this.restUntil) return;
      this.draw();
      // where painting is slow (a busy machine, hundreds of ranks) it is done less often
      this.restUntil = performance.now() + 2 * (performance.now() - from);
    } else {
      this.drawClock();
      this.drawStop();
    }
  }

  acknowledge() {
    acknowledge(this.store, this.send);
  }

  draw() {
    if (!this.root.isConnected) return;
    if (!this.palette.key) this.readTheme();
    this.seen.changes = this.store.changes;
    if (this.seen.epoch !== this.store.epoch) this.forget();
    // canvases first: text on them asks for the page's style, which is reckoned anew after each change of the page
    if (this.numbers.hidden) this.paintCharts();
    this.drawHead();
    this.drawNotices();
    this.drawRanks();
    this.drawHost();
    this.drawCharts();
    if (this.seen.tabs !== this.choices().join() || !this.panel.firstChild) this.placeLogs();
    for (const log of this.shown()) if (!this.side || this.inSight(log)) log.draw();
    this.drawLogTools();
  }

  /** Side by side, only the logs that the box shows are painted. */
  inSight(log) {
    const box = log.element.parentElement;
    const top = box.offsetTop - this.panel.offsetTop - this.panel.scrollTop;
    return top < this.panel.clientHeight && top + box.offsetHeight > 0;
  }

  forget() {
    this.seen.epoch = this.store.epoch;
    for (const row of this.rows.values()) row.element.remove();
    for (const chart of this.charts.values()) {
      this.sight.unobserve(chart.plot);
      this.resized.unobserve(chart.plot);
      chart.element.remove();
    }
    for (const kept of [this.rows, this.charts, this.cells, this.logs, this.hostMeters]) kept.clear();
    this.strip.replaceChildren();
    this.host.replaceChildren();
    delete this.header.dataset.titles;
    this.seen.tabs = "";
    this.stopPressed = 0;
  }

  drawHead() {
    const { run, state, ranks, lineCount } = this.store;
    say(this.name, run.name || "run");
    const asked = this.stopPressed && !OVER.has(state.state);
    this.chip.set(asked ? "stopping" : state.state);
    const size = ranks.size || run.size;
    say(this.facts, [`${size} ${size === 1 ? "rank" : "ranks"}${deviceNames(ranks)}`, `${count(lineCount)} ${lineCount === 1 ? "line" : "lines"}`].join(" · "));
    say(this.why, run.why);
    const over = OVER.has(state.state);
    show(this.buttons, this.canAct && !over);
    show(this.pause, run.background);
    say(this.pause, this.store.following ? "Pause" : "Resume");
    say(this.askStacks, this.store.stacksAsked ? "Asking…" : "Stacks");
    set(this.root, "aria-label", `Distributed run ${run.name}`);
    if (this.seen.state !== null && this.seen.state !== state.state) this.announce(`${run.name}: ${state.state}${state.detail ? `, ${state.detail}` : ""}`);
    this.seen.state = state.state;
    this.drawClock();
    this.drawStop();
  }

  drawNotes() {
    const { state, gaps, skipped } = this.store;
    const notes = [];
    if (state.detail && state.state !== "running") notes.push(state.detail);
    if (skipped) notes.push(`${count(skipped)} lines are only in the files`);
    if (gaps) notes.push(`${count(gaps)} ${gaps === 1 ? "message" : "messages"} from the kernel did not arrive`);
    const silent = (performance.now() - this.store.heard) / 1000;
    if (this.canAct && !OVER.has(state.state) && this.store.following && silent > SILENCE) notes.push(`nothing from the kernel for ${duration(silent)}`);
    if (!this.store.following) notes.push("stands still: press Resume to follow");
    say(this.notes, notes.join(" · "));
  }

  drawClock() {
    say(this.time, duration(elapsed(this.store)));
    this.drawNotes();
  }

  drawNotices() {
    const { quiet, failure, stacks } = this.store;
    show(this.quiet, Boolean(quiet));
    show(this.quietStacks, this.canAct);
    if (quiet) say(this.quietText, quiet.text || `Nothing has come from any rank for ${duration(quiet.seconds)}.`);
    if (failure !== this.seen.failure) {
      this.seen.failure = failure;
      show(this.failure, Boolean(failure));
      this.failure.replaceChildren(...(failure ? [failureView(failure, (text) => this.announce(text))] : []));
      if (failure) this.announce(`Rank ${failure.rank} failed: ${failure.type}: ${failure.message}`);
    }
    if (stacks !== this.seen.stacks) {
      this.seen.stacks = stacks;
      show(this.stacks, Boolean(stacks));
      if (stacks) this.stacksText.replaceChildren(...stacksView(stacks.text));
      this.announce("The stacks are there");
    }
  }
}

/** The lines that have not ended, in the order of ranks; with many ranks the first few. */
function openLines(store) {
  const lines = [];
  for (const known of store.ranks.values()) {
    lines.push(...known.open.values());
    if (lines.length >= 8) break;
  }
  return lines;
}

/** " on cuda:0 … cuda:7", where devices are known. */
function deviceNames(ranks) {
  const names = [...new Set([...ranks.values()].flatMap((known) => [...known.devices.keys()]))];
  if (!names.length) return "";
  return names.length === 1 ? ` on ${names[0]}` : ` on ${names[0]} … ${names.at(-1)}`;
}

/** Red, green and blue of a computed colour, however it is written. */
function pixel(colour) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  return pen.getImageData(0, 0, 1, 1).data;
}

// ------------------------------------------------------------------------------------------------------- where it is hung in

/** Tells the kernel about once a second how far the page has come, so that it can hold back. */
function acknowledge(store, send) {
  const now = performance.now();
  if (!send || store.seq === store.acknowledged || now - store.acknowledgedAt < 1000) return;
  store.acknowledged = store.seq;
  store.acknowledgedAt = now;
  send({ do: "ack", seq: store.seq });
}

function saveFile({ name, text }, buffers) {
  const blob = new Blob([buffers?.[0] ?? text ?? ""], { type: "text/plain" });
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function open(store, el, send) {
  const view = new View(store, send);
  store.views.add(view);
  el.append(view.root);
  view.draw();
  return view;
}

/** The panel from messages alone, without a kernel: what a saved notebook shows. Returns what takes it away. */
export function mount(el, messages, css) {
  const store = makeStore();
  for (const message of messages) feed(store, message);
  if (css) el.append(Object.assign(document.createElement("style"), { textContent: css }));
  const view = open(store, el, null);
  return () => view.close();
}

// A function, called once for a model: `initialize` and `render` are given different objects for the model, and share this.
export default () => {
  const store = makeStore();

  function initialize({ model }) {
    for (const message of model.get("snapshot") ?? []) feed(store, message);
    const send = (message) => model.send(message);
    const hear = (message, buffers) => {
      if (message.log) saveFile(message.log, buffers);
      feed(store, message);
      // also where the page's timers sleep, in a tab in the background
      if (store.views.size) acknowledge(store, send);
    };
    model.on("msg:custom", hear);
    return () => model.off("msg:custom", hear);
  }

  function render({ model, el }) {
    const view = open(store, el, (message) => model.send(message));
    model.send({ do: "hello", view: view.id, seq: store.seq });
    return () => view.close();
  }

  return { initialize, render };
};
