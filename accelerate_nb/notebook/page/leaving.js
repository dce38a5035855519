// What a panel puts into the notebook's document, which only JupyterLab and Notebook tell of.

const VIEW = "application/vnd.jupyter.widget-view+json";

/**
 * Puts a report into the notebook in the place of the panel that it is of, and says whether that was there: a page that was
 * loaded anew while the run went on takes no updates of its outputs, and would save the panel.
 */
export function leave({ of, data, metadata }, notebook) {
  const places = outputsOf(of, notebook);
  for (const [outputs, i] of places) outputs.set(i, { output_type: "display_data", data, metadata });
  return places.length > 0;
}

/** Shows a panel under its cell again, in a page that was loaded anew before the notebook was saved with it. */
export function putBack(place, notebook) {
  if (!place?.cell || outputsOf(place.panel, notebook).length) return;
  const cell = [...(notebook?.model?.cells ?? [])].find((one) => one.id === place.cell);
  if (cell?.outputs?.length !== 0) return;
  const data = { [VIEW]: { version_major: 2, version_minor: 1, model_id: place.panel } };
  cell.outputs.add({ output_type: "display_data", data, metadata: {} });
}

function outputsOf(panel, notebook) {
  const found = [];
  for (const cell of notebook?.model?.cells ?? []) {
    const outputs = cell.outputs;
    for (let i = 0; i < (outputs?.length ?? 0); i++) {
      if (outputs.get(i).data?.[VIEW]?.model_id === panel) found.push([outputs, i]);
    }
  }
  return found;
}
