// The names of metrics: those that code logged, and those that ranks report by themselves (events/metric_names.py).

const AUTOMATIC_PREFIXES = ["speed/", "optimizer/", "memory/"];
const EPOCH = "epoch";

export const isAutomatic = (name) => name === EPOCH || AUTOMATIC_PREFIXES.some((prefix) => name.startsWith(prefix));

/** Names that have a chart: first what code logged, then what ranks report by themselves. */
export function inOrder(names) {
  const charted = [...names].filter((name) => name !== EPOCH);
  return [...charted.filter((name) => !isAutomatic(name)), ...charted.filter(isAutomatic)];
}
