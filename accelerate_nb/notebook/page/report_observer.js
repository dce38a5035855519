// The reports of a run in the page, in whose places its panel stands.

/** Calls `put` with each element of this id that is in the page or comes into it, before it is painted; returns what ends that. */
export function observeReport(id, put) {
  const look = () => {
    for (const report of document.querySelectorAll(`[id="${id}"]`)) {
      if (report.dataset.mounted) continue;
      report.dataset.mounted = "true";
      put(report);
    }
  };
  const watch = new MutationObserver(look);
  watch.observe(document.body, { childList: true, subtree: true });
  look();
  return () => watch.disconnect();
}
