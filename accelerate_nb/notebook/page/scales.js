// Round numbers on a scale.

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
