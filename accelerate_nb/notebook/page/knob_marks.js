// The marks of knobs in a chart: where one was changed while the run went on.

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
