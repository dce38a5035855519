// Numbers, times and sizes as a person reads them, and terminal colours as pieces of styled text.

/** A number as a person reads it: four digits that matter, or so many. */
export function number(value, digits = 4) {
  if (!isKnown(value)) return "–";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(digits - 2).replace("e+", "e");
  if (Number.isInteger(value)) return String(value);
  return size >= 1e4 ? value.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(size)))) : precise(value, digits);
}

/** So many digits that matter, also where that rounds up to a power of ten, which JavaScript would write as 1.000e+4. */
const precise = (value, digits) => value.toPrecision(digits).replace(/.*e.*/, Number);

/** The marks of a scale, in as many digits as tell each from the others, and each as short as says it. */
export function marks(values) {
  for (let digits = 4; ; digits++) {
    const texts = values.map((value) => number(value, digits)).map((text) => (text.includes(".") ? text.replace(/\.?0*(e|$)/, "$1") : text));
    if (digits > 17 || new Set(texts).size === values.length) return texts;
  }
}

const grouped = new Intl.NumberFormat("en"); // made once: `toLocaleString` makes one for each number

/** How many of something: 1,234, or 12.3 M where that is shorter. */
export function count(value) {
  if (!isKnown(value)) return "?";
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

/** Seconds that are left: 24 s, 3 min, 2 h 05 min. */
export function timeLeft(seconds) {
  if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

/** 14:32, on the page's own clock. */
export const clockOfDay = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });

/** Seconds as 4.5 s, 02:03 or 1:02:03. */
export const clockSpan = (seconds) => (Math.abs(seconds) < 60 ? `${Number(seconds.toFixed(1))} s` : duration(seconds));

export const milliseconds = (value) => (value >= 1000 ? `${precise(value / 1000, 3)} s` : `${precise(value, 3)} ms`);

/** Bytes in the unit that leaves a short number. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit++) value /= 1024;
  return `${value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

/** 55.0/80.0 GiB: the unit once where it is the same. */
export function ofBytes(used, total) {
  const [a, b] = [bytes(used), bytes(total)];
  const unit = b.split(" ")[1];
  return a.endsWith(` ${unit}`) ? `${a.split(" ")[0]}/${b}` : `${a}/${b}`;
}

const timeOfDay = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3 });
export const clockTime = (seconds) => timeOfDay.format(seconds * 1000);

/** Whether the kernel has said a value. */
export const isKnown = (value) => value !== null && value !== undefined;

/** JSON has no NaN and no infinity; the kernel writes their names. */
export const real = (value) => (typeof value === "string" ? { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] ?? Number(value) : value);

/** An error in a line; that of the run is no rank's. */
export const failureText = ({ rank, type, message }) => `${rank === null ? "" : `rank ${rank}: `}${type}: ${message}`;

/** The items in their order, as lists of those that follow each other with the same key. */
export function runsOf(items, keyOf) {
  const runs = [];
  items.forEach((item, i) => {
    if (i > 0 && keyOf(item, i) === keyOf(items[i - 1], i - 1)) runs.at(-1).push(item);
    else runs.push([item]);
  });
  return runs;
}

/** 3, 8–11: numbers that follow each other as a span. */
export function spans(numbers) {
  const runs = runsOf(numbers, (number, i) => number - i);
  return runs.map((run) => (run.length === 1 ? run[0] : `${run[0]}–${run.at(-1)}`)).join(", ");
}

// as SEQUENCE of events/terminal_lines.py
const ESCAPES = /\x1b\[([0-9;:]*)m|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c|$)|(?:\x1b\[|\x9b)[0-?]*[ -/]*(?:[@-~]|$)|\x1b[ -/]*[0-~]?|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const COLOUR_SPACE = /([34]8:2):\d*(?=(?::\d+){3})/g; // in `38:2::red:green:blue`
const CUBE = [0, 95, 135, 175, 215, 255];
// the sixteen named colours on a ground that is named, too
const FIXED = [
  "0,0,0", "178,24,24", "24,140,50", "176,128,0", "20,80,200", "160,40,160", "0,130,140", "229,229,229",
  "102,102,102", "224,60,60", "60,190,90", "230,200,60", "80,140,255", "214,112,214", "50,190,210", "255,255,255",
];

// what the codes that stand alone do
const RENDITIONS = {
  1: { bold: true }, 2: { faint: true }, 3: { italic: true }, 4: { underline: true }, 7: { inverse: true }, 9: { through: true },
  22: { bold: false, faint: false }, 23: { italic: false }, 24: { underline: false }, 27: { inverse: false }, 29: { through: false },
  39: { fg: null }, 49: { bg: null },
};
const NAMED = { 3: ["fg", 0], 4: ["bg", 0], 9: ["fg", 8], 10: ["bg", 8] }; // tens of codes -> what they colour, and the first of eight colours

function colourOf256(n) {
  if (n < 16) return `var(--anb-a${n})`;
  if (n >= 232) return `rgb(${Array(3).fill(8 + 10 * (n - 232))})`;
  return `rgb(${[36, 6, 1].map((place) => CUBE[Math.floor((n - 16) / place) % 6])})`;
}

/** Takes the codes of one `ESC[…m` into `style`, and returns the style that follows. */
function graphicRendition(style, codes) {
  let next = { ...style };
  for (let i = 0; i < codes.length; i++) {
    const code = codes[i];
    if (code === 0) next = {};
    else if (code in RENDITIONS) Object.assign(next, RENDITIONS[code]);
    else if (NAMED[Math.floor(code / 10)] && code % 10 < 8) {
      const [place, first] = NAMED[Math.floor(code / 10)];
      next[place] = colourOf256(first + (code % 10));
    } else if (code === 38 || code === 48) {
      const place = code === 38 ? "fg" : "bg";
      if (codes[i + 1] === 5) {
        next[place] = colourOf256(codes[i + 2] & 255);
        i += 2;
      } else if (codes[i + 1] === 2) {
        if (codes.length > i + 4) next[place] = `rgb(${codes.slice(i + 2, i + 5).map((part) => part & 255)})`;
        i += 4;
      }
    }
  }
  return next;
}

/** A foreground and a background given together are a terminal's own: mixed to a theme, each fits that and not the other. */
function coloursOf(style) {
  const pair = style.inverse ? [style.bg ?? "var(--anb-bg)", style.fg ?? "var(--anb-fg)"] : [style.fg, style.bg];
  if (!style.bg) return pair;
  const [fg, bg] = pair.map((colour) => colour?.replace(/^var\(--anb-a(\d+)\)$/, (_, n) => `rgb(${FIXED[n]})`));
  if (!style.inverse && !fg) return [isLight(bg) ? "#000" : "#fff", bg];
  if (style.inverse && !style.fg) return [fg, isLight(fg) ? "#000" : "#fff"];
  return [fg, bg];
}

function isLight(colour) {
  const [red, green, blue] = colour.match(/\d+/g).map(Number);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 128;
}

function cssOf(style) {
  const [fg, bg] = coloursOf(style);
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
  let [style, end] = [{}, 0];
  const emit = (piece) => piece && pieces.push({ text: piece, css: cssOf(style) });
  for (const found of text.matchAll(ESCAPES)) {
    emit(text.slice(end, found.index));
    end = found.index + found[0].length;
    if (found[1] !== undefined) style = graphicRendition(style, found[1].replace(COLOUR_SPACE, "$1").split(/[;:]/).map(Number));
  }
  emit(text.slice(end));
  return pieces;
}

/** A line without its colours: what is searched and copied. */
export const plain = (text) => text.replace(ESCAPES, "");
