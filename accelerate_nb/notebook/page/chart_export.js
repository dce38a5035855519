// The values of all charts outside of the panel.

const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

/** All values that the page has, a line each. */
export function asCsv({ metrics }) {
  const lines = ["name,rank,step,time,value"];
  for (const [name, series] of metrics) {
    for (const [rank, { x, y, t, length }] of series) for (let i = 0; i < length; i++) lines.push([quoted(name), rank, x[i], t[i], y[i]].join());
  }
  return `${lines.join("\n")}\n`;
}

/** Python that reads every value of the run, also those that the page thins out. */
export function asDataFrame({ run }) {
  return `import pandas as pd\n\nmetrics = pd.read_json(${JSON.stringify(`${run.folder}/metrics.jsonl`)}, lines=True)\n`;
}
