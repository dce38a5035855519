// Marks in a chart: where a knob was changed while the run went on, and where values are no numbers.

/** A value as a person would give it. */
export const knobText = (value) => String(Number(value.toPrecision(6)));

/** Draws a dashed line at each change, with the knob's name and its value since. */
export function paintKnobChanges(pen, curve, { axis, palette, store }, { left, right, top, bottom, from, to, across }) {
  pen.strokeStyle = pen.fillStyle = palette.dim;
  pen.setLineDash([3, 3]);
  for (const [name, value, time] of store.knobChanges) {
    const place = axis.ofTime(curve, time);
    if (!(place >= from && place <= to)) continue;
    const x = Math.round(across(place)) + 0.5;
    pen.beginPath();
    pen.moveTo(x, top);
    pen.lineTo(x, bottom);
    pen.stroke();
    pen.textAlign = x > (left + right) / 2 ? "right" : "left";
    pen.fillText(`${name} ${knobText(value)}`, x + (pen.textAlign === "left" ? 3 : -3), top + 7);
  }
  pen.setLineDash([]);
}

/** The newest changes in words. */
export const knobChangesText = (store) => store.knobChanges.slice(-3).map(([name, value]) => ` Knob ${name} changed to ${knobText(value)}.`).join("");

/** A red field from where values of some rank are no numbers, or a line where the newest of them was. */
export function paintBroken(pen, series, { axis, palette }, { left, right, top, bottom, across }) {
  const curves = [...series.values()].filter(({ oddAt }) => oddAt);
  const broken = curves.filter(({ brokenAt }) => brokenAt).map(({ brokenAt }) => brokenAt);
  const places = (broken.length ? broken : curves.map(({ oddAt: [step, , time] }) => [step, time])).map(([step, time]) => across(axis.at(step, time)));
  pen.fillStyle = palette.bad;
  for (const x of places) if (x >= left && x <= right) pen.fillRect(Math.min(x, right - 2), top, 1, bottom - top);
  const first = Math.max(left, Math.min(...places));
  if (!broken.length || first > right) return;
  pen.globalAlpha = 0.2;
  pen.fillRect(first, top, right - first, bottom - top);
  pen.globalAlpha = 1;
}
