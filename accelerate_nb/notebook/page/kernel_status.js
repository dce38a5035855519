// The state of the kernel behind a panel, where the page can read it.

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
