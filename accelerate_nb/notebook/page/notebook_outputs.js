// The panel as an output of the notebook: JupyterLab and Notebook alone give a page access to that.

import { escaped } from "./elements.js";

const VIEW = "application/vnd.jupyter.widget-view+json";
const NOTE = "accelerate-nb-note"; // in the metadata of the line beside a panel, with the panel's id

/**
 * Puts a report into the notebook in the place of the panel that it is of, and says whether that was there: a page that was
 * loaded anew while the run went on takes no updates of its outputs, and would save the panel.
 */
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
  for (const [outputs, i] of notesOf(panel, notebook)) outputs.set(i, { output_type: "display_data", data: { "text/html": "" }, metadata: {} });
}

/** Shows a panel under its cell again, in a page that was loaded anew before the notebook was saved with it. */
export function restorePanel(place, notebook) {
  if (!place?.cell || panelOutputs(place.panel, notebook).length) return;
  const cell = [...(notebook?.model?.cells ?? [])].find((candidate) => candidate.id === place.cell);
  if (cell?.outputs?.length !== 0) return;
  const data = { [VIEW]: { version_major: 2, version_minor: 1, model_id: place.panel } };
  cell.outputs.add({ output_type: "display_data", data, metadata: {} });
}

/**
 * Saves the notebook, again where it changes meanwhile: JupyterLab takes what is changed during a save for saved.
 */
export async function saveNotebook(notebook) {
  const { model } = notebook;
  let changed = false;
  const onChange = () => { changed = true; };
  model.contentChanged.connect(onChange);
  try {
    await notebook.save();
  } finally {
    model.contentChanged.disconnect(onChange);
  }
  if (!changed) return;
  model.dirty = true;
  await notebook.save();
}

const panelOutputs = (panel, notebook) => matchingOutputs(notebook, ({ data }) => data?.[VIEW]?.model_id === panel);

/** The outputs of a notebook that match, each as the list that it is in and its place there. */
export function matchingOutputs(notebook, matches) {
  const found = [];
  for (const cell of notebook?.model?.cells ?? []) {
    const outputs = cell.outputs;
    for (let i = 0; i < (outputs?.length ?? 0); i++) {
      if (matches(outputs.get(i))) found.push([outputs, i]);
    }
  }
  return found;
}
