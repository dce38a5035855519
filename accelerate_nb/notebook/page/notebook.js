// The notebook around a panel: its outputs and its kernel. JupyterLab and Notebook alone give a page access to it.

import { escaped } from "./elements.js";
import { END_STATES, kernelNow } from "./store.js";

const VIEW = "application/vnd.jupyter.widget-view+json";
const NOTE = "accelerate-nb-note"; // in the metadata of the line beside a panel, with the panel's id
const SAVING = Symbol.for("accelerate_nb.saving"); // on the notebook, for each panel has a copy of this module

// a page that was loaded anew while the run went on takes no updates of its outputs, and would save the panel
/** Puts a report into the notebook in the place of the panel that it is of, and says whether that was there. */
export function replacePanel({ of, data, metadata }, notebook) {
  const matches = panelOutputs(of, notebook);
  for (const [outputs, i] of matches) outputs.set(i, { output_type: "display_data", data, metadata });
  takeNote(of, notebook);
  return matches.length > 0;
}

const notesOf = (panel, notebook) => matchingOutputs(notebook, ({ metadata }) => metadata?.[NOTE] === panel);

/** Leaves a line beside a panel in a notebook that is saved while the run goes on: without its kernel nothing draws the panel. */
export function leaveNote(panel, notebook, text) {
  const [found] = panelOutputs(panel, notebook);
  if (!found || notesOf(panel, notebook).length) return;
  found[0].add({ output_type: "display_data", data: { "text/html": `<div class="anb-note">${escaped(text)}</div>`, "text/plain": text }, metadata: { [NOTE]: panel } });
}

/** Empties that line; an output that is removed stays in JupyterLab's file. */
export function takeNote(panel, notebook) {
  const notes = notesOf(panel, notebook);
  for (const [outputs, i] of notes) outputs.set(i, { output_type: "display_data", data: { "text/html": "" }, metadata: {} });
  if (notes.length && notebook[SAVING]) saveNotebook(notebook); // the save that goes on may have the line still
}

/** Shows a panel under its cell again, in a page that was loaded anew before the notebook was saved with it. */
export function restorePanel(place, notebook) {
  if (!place?.cell || panelOutputs(place.panel, notebook).length) return;
  const cell = [...(notebook?.model?.cells ?? [])].find((candidate) => candidate.id === place.cell);
  if (cell?.outputs?.length !== 0) return;
  const data = { [VIEW]: { version_major: 2, version_minor: 1, model_id: place.panel } };
  cell.outputs.add({ output_type: "display_data", data, metadata: {} });
}

/** Draws a panel again where JupyterLab says that it found no model of it; returns what ends that. */
export function redrawLostPanel(place, notebook, views) {
  // it waits two seconds for a model and does not look again after its last pause, in which a slow page has made the model
  const seen = new WeakSet(); // what an output shows may be another panel's, or that of a widget whose kernel has ended
  return watchPage(() => {
    for (const output of document.querySelectorAll(".jp-OutputArea-output.jupyter-widgets")) {
      // its own text: that of all that a panel holds is long
      if (seen.has(output) || output.firstChild?.nodeValue !== "Error displaying widget: model not found") continue;
      seen.add(output);
      const panels = panelOutputs(place?.panel, notebook);
      if (views.size < panels.length) for (const [outputs, i] of panels) outputs.set(i, outputs.get(i).toJSON());
    }
  });
}

/** Calls `onStart` when a save of the notebook starts, and notes how long it goes on; returns what ends that. */
export function watchSaves(notebook, onStart) {
  const onSave = (_, state) => {
    notebook[SAVING] = state === "started";
    if (notebook[SAVING]) onStart();
  };
  notebook?.saveState?.connect(onSave);
  return () => notebook?.saveState?.disconnect(onSave);
}

/** Saves the notebook, again where it changes meanwhile: JupyterLab takes what is changed during a save for saved. */
export async function saveNotebook(notebook) {
  const { model } = notebook;
  // during another save JupyterLab takes the file for changed by somebody else, and asks which version to keep
  for (let waits = 0; notebook[SAVING] && waits < 50; waits++) await new Promise((resolve) => setTimeout(resolve, 100));
  if (notebook.isDisposed) return; // it was closed, as the kernel was shut down or later
  notebook[SAVING] = true;
  let changed = true;
  const onChange = () => { changed = true; };
  model.contentChanged.connect(onChange);
  try {
    for (let saves = 0; changed && saves < 2; saves++) {
      changed = false;
      model.dirty = true;
      await notebook.save();
    }
  } catch {
    // JupyterLab has shown why
  } finally {
    notebook[SAVING] = false;
    model.contentChanged.disconnect(onChange);
  }
}

// without a panel none, not those that are of no widget
const panelOutputs = (panel, notebook) => matchingOutputs(notebook, ({ data }) => panel && data?.[VIEW]?.model_id === panel);

/** The outputs of a notebook that match, each as the list that it is in and its place there. */
export function matchingOutputs(notebook, matches) {
  const found = [];
  for (const { outputs } of notebook?.model?.cells ?? []) {
    for (let i = 0; i < (outputs?.length ?? 0); i++) if (matches(outputs.get(i))) found.push([outputs, i]);
  }
  return found;
}

/** Calls `put` with each element of this id that is in the page or comes into it, before it is painted; returns what ends that. */
export function observeReport(id, put) {
  return watchPage(() => {
    for (const report of document.querySelectorAll(`[id="${id}"]:not([data-mounted])`)) {
      report.dataset.mounted = "true";
      put(report);
    }
  });
}

/** Calls `look` now and whenever elements come into the page; returns what ends that. */
export function watchPage(look) {
  const watch = new MutationObserver(look);
  watch.observe(document.body, { childList: true, subtree: true });
  look();
  return () => watch.disconnect();
}

const ENDS = {
  restarting: "was restarted",
  starting: "was restarted", // by another page, which alone is told that it restarts
  autorestarting: "died",
  dead: "died",
  terminating: "was shut down",
};

/** Calls `ended` with what happened to a session's kernel, and `connected` with whether the page can reach it; returns what ends that. */
export function watchKernel(session, { ended, connected }) {
  if (!session?.statusChanged) return () => {}; // JupyterLab and Notebook alone tell of their session
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
