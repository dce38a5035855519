// What a panel leaves in the notebook when its run is over.

/**
 * Puts the report into the notebook in the place of the panel that it is of: a page that was loaded anew while the run went
 * on takes no updates of its outputs, and would save the panel. Only JupyterLab and Notebook tell of their document.
 */
export function leave({ of, data, metadata }, document_) {
  for (const cell of document_?.model?.cells ?? []) {
    const outputs = cell.outputs;
    for (let i = 0; i < (outputs?.length ?? 0); i++) {
      const view = outputs.get(i).data?.["application/vnd.jupyter.widget-view+json"];
      if (view?.model_id === of) outputs.set(i, { output_type: "display_data", data, metadata });
    }
  }
}
