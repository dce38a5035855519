// The states of runs and of ranks, as signs.

export const SYMBOLS = { starting: "○", running: "▶", finished: "✓", failed: "✕", stopped: "■", stopping: "◼" };
export const OVER = new Set(["finished", "failed", "stopped"]);
