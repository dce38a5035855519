// The states of runs and of ranks, as signs.

export const SYMBOLS = { starting: "○", running: "▶", finished: "✓", failed: "✕", stopped: "■", stopping: "◼" };
export const END_STATES = new Set(["finished", "failed", "stopped"]);
