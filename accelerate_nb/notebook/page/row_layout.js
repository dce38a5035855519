// The positions of the lines of a log, so that rows out of sight need not exist.

import { plain } from "./ansi.js";

/** Height of a row in pixels, as the style sheet has it. */
export const LINE = 18;

/** The places of so many lines: all of one row, or as many rows as `tops` (in rows, one more than lines) leaves room for. */
export class RowLayout {
  constructor(length, tops = null) {
    this.length = length;
    this.tops = tops;
    this.end = this.top(length);
  }

  /** How far down a line begins, in pixels. */
  top(i) {
    return LINE * (this.tops ? this.tops[Math.min(i, this.length)] : i);
  }

  /** The line that stands so many pixels down. */
  at(pixels) {
    const row = Math.floor(pixels / LINE);
    if (!this.tops) return Math.min(row, this.length);
    let [low, high] = [0, this.length];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.tops[middle] <= row) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

/** The places of lines that are broken after so many letters. */
export function rowLayout(length, lineAt, columns) {
  if (columns === Infinity) return new RowLayout(length);
  const tops = new Float64Array(length + 1);
  for (let i = 0; i < length; i++) tops[i + 1] = tops[i] + Math.max(1, Math.ceil(lettersOf(lineAt(i)) / columns));
  return new RowLayout(length, tops);
}

// reckoned once a line: every painting asks for all lines
function lettersOf(line) {
  return (line.letters ??= letters(plain(line.text)));
}

/** How wide a text is in letters of one width; what may be wide counts as wide, so that there is room for it. */
export function letters(text) {
  if (/^[\x20-\x7e]*$/.test(text)) return text.length;
  let wide = 0;
  for (const letter of text) wide += letter === "\t" ? 8 : letter.codePointAt(0) >= 0x1100 ? 2 : 1;
  return wide;
}
