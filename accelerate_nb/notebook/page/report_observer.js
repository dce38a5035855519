// The end of a run in a page that showed it live: the panel stays where the report takes its place.

const MOST_SECONDS = 30; // between the last message and the report, on a slow machine

/**
 * Calls `put` with each element of this id that comes into the page within a while, before anything of it is painted.
 *
 * The notebook puts the report into the panel's place, whose script would draw the panel again only a moment later.
 */
export function awaitReport(id, put) {
  const take = () => {
    for (const report of document.querySelectorAll(`[id="${id}"]`)) {
      if (report.dataset.mounted) continue;
      report.dataset.mounted = "true";
      const place = document.createElement("div");
      report.before(place);
      report.hidden = true;
      put(place);
    }
  };
  const watch = new MutationObserver(take);
  watch.observe(document.body, { childList: true, subtree: true });
  setTimeout(() => watch.disconnect(), MOST_SECONDS * 1000);
}
