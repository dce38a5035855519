// The names of metrics: those that code logged, and those that ranks report by themselves (events/metric_names.py).

const AUTOMATIC_PREFIXES = ["speed/", "optimizer/", "memory/"];
const EPOCH = "epoch";
const SUMMED = new Set(["speed/samples_per_s", "speed/tokens_per_s"]);

/** Whether each rank reports its own part, so that all together have the sum. */
export const isSummed = (name) => SUMMED.has(name);

export const isAutomatic = (name) => name === EPOCH || AUTOMATIC_PREFIXES.some((prefix) => name.startsWith(prefix));

/** Names that have a chart: first what code logged, then what ranks report by themselves. */
export function inOrder(names) {
  const charted = [...names].filter((name) => name !== EPOCH);
  return [...charted.filter((name) => !isAutomatic(name)), ...charted.filter(isAutomatic)];
}
