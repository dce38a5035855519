// The table of runs: a press on a row opens its run under the row, another one closes it.

import { h, set, setText } from "./elements.js";
import { matchingOutputs, watchPage } from "./notebook.js";

const MARK = "accelerate-nb-runs"; // in the metadata of the outputs below the table's own: the run, and the rows after it
const LINK =
  "background:none;border:0;padding:0;font:inherit;color:inherit;text-align:left;text-decoration:underline;cursor:pointer;" +
  "display:block;max-width:100%;overflow:hidden;text-overflow:ellipsis";
const OPEN = "inset 3px 0 0 var(--jp-brand-color1, #1976d2)";

/** Lets the rows of a model's table open, one run at a time; returns what ends that. */
function openRows(model, notebook) {
  const id = model.get("table");
  const buttons = new Map(); // number of a run -> its button
  let opened = null; // the number of the run that is under its row
  let waits = false;
  let focused = null; // the number of the row that a press has drawn anew

  // "12 min ago", as the kernel writes it; after a day, the date that it wrote
  const drawAges = () => {
    for (const cell of document.querySelectorAll(`[data-runs="${id}"] [data-at]`)) {
      const seconds = Math.max(0, Math.floor(Date.now() / 1000 - Number(cell.dataset.at)));
      if (seconds >= 86400) setText(cell, cell.title.slice(0, 16));
      else setText(cell, `${seconds >= 3600 ? `${Math.floor(seconds / 3600)} h` : seconds >= 60 ? `${Math.floor(seconds / 60)} min` : `${seconds} s`} ago`);
    }
  };

  const draw = () => {
    for (const [number, button] of buttons) {
      const isOpen = number === opened;
      set(button, "aria-expanded", isOpen);
      set(button, "aria-busy", isOpen && waits);
      const row = button.closest("tr");
      if (row) row.style.boxShadow = isOpen ? OPEN : "";
    }
  };

  const press = (number) => {
    focused = number;
    opened = number === opened ? null : number;
    waits = opened !== null;
    draw();
    model.send({ open: opened });
  };

  /** Makes the rows of tables that are new in the page into buttons; a table is in two parts while a run is open. */
  const dress = () => {
    const tables = document.querySelectorAll(`[data-runs="${id}"] table:not([data-lm-suppress-shortcuts])`);
    for (const table of tables) {
      // in a notebook keys of a button would insert and delete cells
      set(table, "data-lm-suppress-shortcuts", "true");
      table.addEventListener("keydown", (event) => event.stopPropagation());
      table.querySelector("col:last-child").remove(); // the call that the press makes needless
      for (const row of table.rows) {
        const call = row.lastElementChild;
        call.remove();
        if (!row.dataset.run) continue;
        const number = Number(row.dataset.run);
        const cell = row.querySelector("[data-name]");
        const title = `${cell.textContent}\nShow this run under the row\nfrom anywhere: ${call.textContent}`;
        const button = h("button", { type: "button", style: LINK, title }, cell.textContent);
        cell.replaceChildren(button);
        row.style.cursor = "pointer";
        row.addEventListener("click", () => !button.disabled && document.getSelection().isCollapsed && press(number));
        buttons.set(number, button);
      }
    }
    if (!tables.length) return;
    drawAges();
    draw();
    if (focused !== null) buttons.get(focused)?.focus({ preventScroll: true });
  };

  /** Puts the run that the kernel sends into the notebook, between the parts of the table, so that it is saved with them. */
  const onMessage = ({ show, parts, data, metadata }) => {
    if (show !== opened) return;
    waits = false;
    draw();
    const find = (matches) => matchingOutputs(notebook, matches)[0];
    const table = find((output) => !output.metadata?.[MARK] && String(output.data?.["text/html"]).includes(`data-runs="${id}"`));
    if (!table) return;
    const [outputs, index] = table;
    const put = (part, content) => {
      const found = find((output) => output.metadata?.[MARK] === `${id} ${part}`);
      // an output that is removed stays in JupyterLab's file
      if (!found && !content.data) return;
      const output = { output_type: "display_data", data: { "text/html": "" }, ...content, metadata: { ...content.metadata, [MARK]: `${id} ${part}` } };
      if (found) found[0].set(found[1], output);
      else outputs.add(output);
    };
    if (parts) {
      const own = outputs.get(index).toJSON();
      outputs.set(index, { ...own, data: { ...own.data, "text/html": parts[0] } });
    }
    put("run", data ? { data, metadata } : {});
    if (parts) put("rest", parts[1] ? { data: { "text/html": parts[1] } } : {});
  };

  model.on("msg:custom", onMessage);
  // the table comes after its widget, and anew where the notebook draws it again
  const unwatch = watchPage(dress);
  const clock = setInterval(drawAges, 30000);
  return () => {
    clearInterval(clock);
    unwatch();
    model.off("msg:custom", onMessage);
    for (const button of buttons.values()) button.disabled = true;
  };
}

export default () => ({
  initialize({ model }) {
    const notebook = model.widget_manager?.context;
    // JupyterLab and Notebook alone give a page access to the notebook
    return notebook?.model?.cells && openRows(model, notebook);
  },
});
