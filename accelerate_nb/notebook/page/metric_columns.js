// Points of metrics as a saved report holds them: differences between whole numbers.

/** Rows of metrics as other messages have them, from columns: of series, decimals, steps, values and times. */
export function rowsOf([series, decimals, steps, values, times]) {
  return series.map(([name, rank], i) => {
    const [x, y, t] = [summed(steps[i], 1), summed(values[i], 10 ** decimals[i]), summed(times[i], 100)];
    return [name, rank, x.map((step, at) => [step, y[at], t[at]])];
  });
}

function summed(differences, scale) {
  let sum = 0;
  return differences.map((difference) => (sum += difference) / scale);
}
