// The button that puts a text as a cell below the one that shows it: JupyterLab and Notebook alone give a page access to that.

/** The index of the cell that shows an element, or the last one's where the page does not say. */
function indexOfCell(el, cells) {
  const shown = el.closest(".jp-Cell");
  const all = shown ? [...shown.parentElement.querySelectorAll(":scope > .jp-Cell")] : [];
  const windowed = shown?.closest("[data-windowed-list-index]")?.dataset.windowedListIndex;
  const index = windowed === undefined ? all.indexOf(shown) : Number(windowed);
  return index < 0 ? cells.length - 1 : index;
}

function render({ model, el }) {
  const notebook = model.widget_manager?.context?.model;
  if (!notebook?.sharedModel?.insertCell) return;
  const said = Object.assign(document.createElement("span"), { className: "acc-said" });
  said.setAttribute("role", "status");
  const button = Object.assign(document.createElement("button"), { type: "button", className: "jupyter-button", textContent: "Insert as cell" });
  button.addEventListener("click", () => {
    const index = indexOfCell(el, notebook.cells) + 1;
    notebook.sharedModel.insertCell(index, { cell_type: "code", source: model.get("code"), metadata: {} });
    said.textContent = "Inserted below";
  });
  const draw = () => {
    button.disabled = !model.get("code");
    said.textContent = "";
  };
  draw();
  model.on("change:code", draw);
  el.append(button, " ", said);
  return () => model.off("change:code", draw);
}

export default { render };
