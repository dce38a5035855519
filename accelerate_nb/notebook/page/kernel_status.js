// The state of the kernel behind a panel, where the page can read it, and what it makes of the run.

import { END_STATES } from "./states.js";
import { kernelNow } from "./store.js";

const ENDS = {
  restarting: "was restarted",
  starting: "was restarted", // by another page, which alone is told that it restarts
  autorestarting: "died",
  dead: "died",
  terminating: "was shut down",
};

/**
 * Calls `ended` with what happened to a session's kernel, and `connected` with whether the page can reach it.
 *
 * Only JupyterLab and Notebook tell of their session. Returns what ends the watching.
 */
export function watchKernel(session, { ended, connected }) {
  if (!session?.statusChanged) return () => {};
  const kernelId = () => session.session?.kernel?.id;
  const kernel = kernelId();
  const signals = [
    [session.statusChanged, (_, status) => ENDS[status] && ended(ENDS[status])],
    [session.connectionStatusChanged, (_, status) => connected(status === "connected")],
    [session.kernelChanged, () => kernelId() !== kernel && ended("was shut down")],
  ];
  for (const [signal, slot] of signals) signal.connect(slot);
  return () => {
    for (const [signal, slot] of signals) signal.disconnect(slot);
  };
}

/** The kernel has ended, and the run with it unless it is detached: what came before stands. Whether this is news. */
export function endWithKernel(store, reason) {
  if (END_STATES.has(store.state.state) && !store.gone) return false;
  const isNews = !store.gone;
  // a kernel that died is restarted, too
  const { attach, folder } = store.run;
  const follows = attach ? `and this run goes on without it. In any notebook, ${attach} shows it again. The` : "and this run ended with it. The";
  if (isNews || reason === "died") store.gone = `The kernel ${reason}, ${follows} output until then is here; all output: ${folder}`;
  if (isNews) store.state = { ...(attach ? store.state : { state: "stopped", detail: "" }), ended: store.lostAt ?? kernelNow(store) };
  for (const rankState of attach ? [] : store.ranks.values()) if (!END_STATES.has(rankState.state)) rankState.state = "stopped";
  Object.assign(store, { idleWarning: null, stacksRequested: false, lostAt: null });
  store.changes++;
  return isNews;
}

/** Whether the page can reach the kernel; without it the clock stands. Whether this is news. */
export function takeConnection(store, connected) {
  if (connected === (store.lostAt === null) || END_STATES.has(store.state.state)) return false;
  store.lostAt = connected ? null : kernelNow(store);
  store.changes++;
  return true;
}
