// Numbers, times and sizes as a person reads them.

/** A number as a person reads it: four digits that matter, or so many. */
export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(digits - 2).replace("e+", "e");
  if (Number.isInteger(value)) return String(value);
  return size >= 1e4 ? value.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(size)))) : value.toPrecision(digits);
}

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

export const milliseconds = (value) => (value >= 1000 ? `${(value / 1000).toPrecision(3)} s` : `${value.toPrecision(3)} ms`);

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

export function clockTime(seconds) {
  const at = new Date(seconds * 1000);
  return `${at.toLocaleTimeString("en-GB")}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}

/** Whether the kernel has said a value. */
export const isKnown = (value) => value !== null && value !== undefined;

/** JSON has no NaN and no infinity; the kernel writes their names. */
export function real(value) {
  if (typeof value !== "string") return value;
  return { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] ?? Number(value);
}

/** An error in a line; that of the run is no rank's. */
export const failureText = ({ rank, type, message }) => `${rank === null ? "" : `rank ${rank}: `}${type}: ${message}`;

/** 3, 8–11: numbers that follow each other as a span. */
export function spans(numbers) {
  const found = [];
  for (const number of numbers) {
    if (found.length && found.at(-1)[1] === number - 1) found.at(-1)[1] = number;
    else found.push([number, number]);
  }
  return found.map(([from, to]) => (from === to ? from : `${from}–${to}`)).join(", ");
}
