// A log that scrolls, of which only the rows in sight exist.

import { button, div, h, setStyle, setText, show, span } from "./elements.js";
import { ansi, clockTime, count, plain } from "./format.js";
import { lastUpTo } from "./series.js";

/** Height of a row in pixels, as the style sheet has it. */
export const LINE = 18;

/** The places of so many lines: all of one row, or as many rows as their letters take where so many stand beside each other. */
class RowLayout {
  constructor(length, lineAt, columns) {
    this.length = length;
    // in rows, one more than lines
    this.tops = columns === Infinity ? null : new Float64Array(length + 1);
    for (let i = 0; this.tops && i < length; i++) {
      const line = lineAt(i);
      // reckoned once a line: every painting asks for all lines
      line.letters ??= letters(plain(line.text));
      this.tops[i + 1] = this.tops[i] + Math.max(1, Math.ceil(line.letters / columns));
    }
    this.end = this.top(length);
  }

  /** How far down a line begins, in pixels. */
  top(i) {
    return LINE * (this.tops ? this.tops[Math.min(i, this.length)] : i);
  }

  /** The line that stands so many pixels down. */
  at(pixels) {
    const row = Math.floor(pixels / LINE);
    return this.tops ? lastUpTo(this.tops, row) : Math.min(row, this.length);
  }
}

/** How wide a text is in letters of one width; what may be wide counts as wide, so that there is room for it. */
export function letters(text) {
  if (/^[\x20-\x7e]*$/.test(text)) return text.length;
  let wide = 0;
  for (const letter of text) wide += letter === "\t" ? 8 : letter.codePointAt(0) >= 0x1100 ? 2 : 1;
  return wide;
}

/** One scrolling log over a ring. Rows exist only where one looks, and stay the same elements while they are in sight. */
export class LogView {
  constructor({ ring, open, showRank, label, changed, isOver }) {
    Object.assign(this, { ring, open, showRank, changed, isOver, follow: true, top: 0 });
    this.current = null; // number of the line that the search stands at
    this.rows = new Map(); // number of the line -> {row, line}
    this.layout = new RowLayout(0, null, Infinity);
    this.inner = div("anb-lines");
    this.scroller = h(
      "div",
      { class: "anb-log", role: "log", "aria-live": "off", "aria-label": label, tabindex: "0", onscroll: () => this.scrolled() },
      this.inner,
    );
    this.jump = button("anb-jump", "", () => this.toNewest(), { hidden: true }); // a log without a line is never painted
    this.empty = div("anb-empty", "No output yet");
    this.element = div("anb-logbox", this.scroller, this.jump, this.empty);
    this.forget();
  }

  forget() {
    this.source = this.ring();
    this.seen = this.source.dropped;
    this.newestSeen = this.source.dropped + this.source.length;
    this.startAnew();
  }

  startAnew() {
    this.matches = []; // numbers of the lines that hold what is searched
    this.filteredLines = []; // numbers of the lines that a filter leaves
    this.searched = 0; // number of the first line that was not searched yet
    this.rows.clear();
    this.inner.replaceChildren();
  }

  /** Takes what the tools say: `query` in lower case, and whether `only` its matches or `errors` are shown, with `times`, and lines that `wrap`. */
  configure(settings) {
    if (settings.query !== this.query) this.current = null;
    Object.assign(this, settings);
    this.startAnew();
    this.scroller.classList.toggle("anb-wrap", this.wrap);
    this.measure();
    this.draw();
  }

  /** Whether some lines are left out. */
  get filtered() {
    return this.errors || (this.only && this.query !== "");
  }

  /** Searches each new line once; how many of those that a filter left have gone since. */
  search() {
    const { source, filtered } = this;
    const end = source.dropped + source.length;
    if (!this.query && !filtered) return 0;
    for (let i = Math.max(this.searched, source.dropped); i < end; i++) {
      const line = source.at(i - source.dropped);
      if (this.errors && line.meaning !== "error") continue;
      const hit = this.query !== "" && this.hits(line);
      if (hit) this.matches.push(i);
      if (filtered && (hit || !this.only || !this.query)) this.filteredLines.push(i);
    }
    this.searched = end;
    dropBelow(this.matches, source.dropped);
    return dropBelow(this.filteredLines, source.dropped);
  }

  hits(line) {
    return plain(line.text).toLowerCase().includes(this.query);
  }

  /** Whether the filters leave a line. */
  passes(line) {
    return (!this.errors || line.meaning === "error") && (!this.only || this.hits(line));
  }

  measure() {
    this.sight = this.scroller.clientHeight;
    this.columns = Infinity; // letters of a line that stand beside each other
    if (!this.wrap || !this.sight) return;
    const probe = h("div");
    fillRow(probe, { rank: 0, stream: 0, time: 0, text: "x".repeat(100) }, { ...this, showRank: this.showRank, query: "" });
    probe.classList.add("anb-probe");
    this.inner.append(probe);
    const text = probe.querySelector(".anb-text").getBoundingClientRect();
    const before = text.left - probe.getBoundingClientRect().left;
    probe.remove();
    if (text.width) this.columns = Math.max(8, Math.floor((this.scroller.clientWidth - before - 11) / (text.width / 100)));
  }

  scrolled() {
    const at = this.scroller.scrollTop;
    if (at === this.top) return; // we did it ourselves
    // only a person makes it go up: what grows below is no reason to stop following
    if (at + this.sight >= this.layout.end - LINE) this.follow = true;
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

  draw() {
    this.paint();
    this.settle();
  }

  /** What is to be seen, as rows. Asks the page for nothing where it follows, so that many logs make one layout. */
  paint() {
    if (this.ring() !== this.source) this.forget();
    const { source, filtered } = this;
    const goneFiltered = this.search();
    const open = this.open().filter((line) => this.passes(line));
    const whole = filtered ? this.filteredLines.length : source.length;
    const lineAt = (i) => (i >= whole ? open[i - whole] : source.at(filtered ? this.filteredLines[i] - source.dropped : i));
    const former = this.layout;
    this.layout = new RowLayout(whole + open.length, lineAt, this.columns);
    const selection = document.getSelection();
    this.selectionHeld = Boolean(selection && !selection.isCollapsed && this.inner.contains(selection.anchorNode));
    show(this.empty, whole + open.length === 0);
    this.element.classList.toggle("anb-blank", whole + open.length === 0 && !filtered);
    setText(this.empty, !filtered ? "No output yet" : this.only && this.query ? "No line matches" : "No errors");
    if (!this.sight) this.measure();
    if (!this.sight) return;
    const gone = filtered ? goneFiltered : source.dropped - this.seen;
    this.seen = source.dropped;
    const lowest = Math.max(0, this.layout.end - this.sight);
    if (this.follow && !this.selectionHeld) this.top = lowest;
    else this.top = Math.min(lowest, Math.max(0, this.scroller.scrollTop - former.top(gone)));
    setStyle(this.inner, "height", `${this.layout.end}px`);
    // the log of a run that is over takes no more room than its lines, and a bar to scroll them
    setStyle(this.scroller, "maxHeight", this.isOver() ? `${this.layout.end + 20}px` : "");
    this.drawRows({ filtered, whole, lineAt });
    const news = source.dropped + source.length - this.newestSeen;
    show(this.jump, !this.follow || this.selectionHeld);
    setText(this.jump, news > 0 ? `↓ Jump to newest (${count(news)} new)` : "↓ Jump to newest");
  }

  /** Scrolls to where it stands; what is read is what the browser made of it. */
  settle() {
    if (!this.sight) return;
    if (this.follow && !this.selectionHeld) {
      this.scroller.scrollTop = this.layout.end;
      this.newestSeen = this.source.dropped + this.source.length;
    } else if (this.scroller.scrollTop !== this.top) this.scroller.scrollTop = this.top;
    this.top = this.scroller.scrollTop;
  }

  drawRows({ filtered, whole, lineAt }) {
    const { source, layout } = this;
    const from = Math.max(0, layout.at(this.top) - 5);
    const to = Math.min(layout.length, layout.at(this.top + this.sight) + 6);
    const end = source.dropped + source.length;
    const wanted = new Map();
    for (let i = from; i < to; i++) {
      wanted.set(i >= whole ? end + i - whole : filtered ? this.filteredLines[i] : source.dropped + i, [i, lineAt(i)]);
    }
    for (const [key, { row }] of this.rows) {
      if (wanted.has(key)) continue;
      // what is selected stays in the page, so that it can be copied whole
      if (this.selectionHeld && this.rows.size < 3000 && !filtered && key >= source.dropped && key < end) wanted.set(key, [key - source.dropped, null]);
      else {
        row.remove();
        this.rows.delete(key);
      }
    }
    let next = this.inner.firstChild;
    for (const key of [...wanted.keys()].sort((a, b) => a - b)) {
      const [position, line] = wanted.get(key);
      if (!this.rows.has(key)) this.rows.set(key, { row: h("div", { class: "anb-line" }), line: null });
      const item = this.rows.get(key);
      if (line && item.line !== line && !(this.selectionHeld && item.line)) {
        fillRow(item.row, line, this);
        item.line = line;
      }
      setStyle(item.row, "top", `${this.layout.top(position)}px`);
      setStyle(item.row, "height", this.wrap ? `${this.layout.top(position + 1) - this.layout.top(position)}px` : "");
      item.row.classList.toggle("anb-current", key === this.current);
      if (item.row === next) next = next.nextSibling;
      else this.inner.insertBefore(item.row, next);
    }
  }

  /** Goes to the match with this number in `matches`. */
  goTo(index) {
    this.current = this.matches[index];
    this.follow = false;
    const position = this.filtered ? this.filteredLines.indexOf(this.current) : this.current - this.source.dropped;
    this.scroller.scrollTop = Math.max(0, this.layout.top(position) - this.sight / 2);
    this.draw();
    this.changed();
  }

  /** All lines that it shows, as text; with ranks where it shows them. */
  text() {
    const { source } = this;
    return [...Array.from({ length: source.length }, (_, i) => source.at(i)), ...this.open()]
      .filter((line) => this.passes(line))
      .map((line) => (this.times ? `${clockTime(line.time)} ` : "") + (this.showRank() ? `[${line.rank}] ` : "") + plain(line.text))
      .join("\n");
  }
}

/** Takes the numbers of lines that have gone out of a list in order; how many those were. */
function dropBelow(numbers, first) {
  const kept = numbers.findIndex((number) => number >= first);
  return numbers.splice(0, kept < 0 ? numbers.length : kept).length;
}

// what is no alarm has a faint sign
const SIGNS = { error: ["✖", "error"], warning: ["!", "warning"], stderr: ["╎", "standard error"] };

/** Fills a row: gutter (time, rank, what it means) and the coloured text, with what was searched marked. */
function fillRow(row, line, { showRank, times, query }) {
  const gutter = [];
  if (times) gutter.push(span("anb-time", clockTime(line.time)));
  if (showRank() && line.rank !== null) gutter.push(span(`anb-rank anb-r${line.rank % 8}`, String(line.rank)));
  const kind = line.meaning || (line.stream ? "stderr" : line.rank === null ? "aside" : "");
  const [sign, title] = SIGNS[kind] ?? [];
  gutter.push(sign ? h("span", { class: "anb-mark", title }, sign, span("anb-sr", ` ${title} `)) : span("anb-mark"));
  row.className = "anb-line";
  row.dataset.means = kind;
  row.replaceChildren(...gutter, span("anb-text", ...pieces(line.text, query), "\n"));
}

/** A line in its colours, as elements; a match may lie across several of them. */
function pieces(text, query) {
  const whole = query ? plain(text) : "";
  const low = whole.toLowerCase();
  const edges = []; // where matches begin and end, in turn; nowhere where lower case has another length than the text
  for (let i = query && low.length === whole.length ? low.indexOf(query) : -1; i >= 0 && edges.length < 1000; i = low.indexOf(query, i + query.length)) edges.push(i, i + query.length);
  let [at, passed] = [0, 0]; // letters, and edges, that are behind
  return ansi(text).flatMap((part) => {
    const nodes = [];
    for (let from = 0; from < part.text.length;) {
      while (edges[passed] <= at) passed++;
      const isMatch = passed % 2 === 1;
      const piece = part.text.slice(from, from + (edges[passed] ?? Infinity) - at);
      nodes.push(isMatch || part.css ? h(isMatch ? "mark" : "span", { class: isMatch ? "anb-hit" : null, style: part.css || null }, piece) : piece);
      from += piece.length;
      at += piece.length;
    }
    return nodes;
  });
}
