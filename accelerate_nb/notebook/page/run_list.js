// The table of runs: a press on a row opens its run below the table, another one closes it.

import { h, set } from "./elements.js";
import { matchingOutputs } from "./notebook_outputs.js";

const MARK = "accelerate-nb-runs"; // in the metadata of the output with the run, with the id of its table
const LINK = "background:none;border:0;padding:0;font:inherit;color:inherit;text-align:left;text-decoration:underline;cursor:pointer";
const OPEN = "inset 3px 0 0 var(--jp-brand-color1, #1976d2)";

/** A table whose rows open; `opened` is the number of the row whose run is below it. */
class RunList {
  constructor(model, notebook) {
    this.model = model;
    this.notebook = notebook;
    this.id = model.get("table");
    this.opened = null;
    this.buttons = [];
    this.onMessage = (message) => this.show(message);
    model.on("msg:custom", this.onMessage);
    // the table comes after its widget, and anew where the notebook draws it again
    this.watch = new MutationObserver(() => this.dress());
    this.watch.observe(document.body, { childList: true, subtree: true });
    this.dress();
  }

  close() {
    this.watch.disconnect();
    this.model.off("msg:custom", this.onMessage);
    for (const button of this.buttons) button.disabled = true;
  }

  dress() {
    const table = document.getElementById(this.id);
    if (!table || this.buttons[0]?.closest("table") === table) return;
    const [head, ...rows] = table.rows;
    for (const row of table.rows) row.lastElementChild.hidden = true; // the call that the press makes needless
    const name = [...head.cells].findIndex((cell) => cell.textContent === "name");
    // in a notebook keys of a button would insert and delete cells
    set(table, "data-lm-suppress-shortcuts", "true");
    table.addEventListener("keydown", (event) => event.stopPropagation());
    this.buttons = rows.map((row, number) => this.button(row, row.cells[name], number));
    this.draw();
  }

  button(row, cell, number) {
    const call = row.lastElementChild.textContent;
    const button = h("button", { type: "button", style: LINK, title: `Show this run below the table\nfrom anywhere: ${call}` }, cell.textContent);
    cell.replaceChildren(button);
    row.style.cursor = "pointer";
    row.addEventListener("click", () => document.getSelection().isCollapsed && this.press(number));
    return button;
  }

  press(number) {
    const closes = number === this.opened;
    this.opened = closes ? null : number;
    this.draw(!closes);
    this.model.send({ open: this.opened });
  }

  draw(waits = false) {
    for (const [number, button] of this.buttons.entries()) {
      const isOpen = number === this.opened;
      set(button, "aria-expanded", isOpen);
      set(button, "aria-busy", isOpen && waits);
      button.closest("tr").style.boxShadow = isOpen ? OPEN : "";
    }
  }

  /** Puts the run that the kernel sends into the notebook, so that it is saved with the table. */
  show({ show, data, metadata }) {
    if (show !== this.opened) return;
    this.draw();
    const isTable = (output) => String(output.data?.["text/html"] ?? "").includes(`id="${this.id}"`);
    const [below] = matchingOutputs(this.notebook, (output) => output.metadata?.[MARK] === this.id);
    const [table] = matchingOutputs(this.notebook, isTable);
    const output = { output_type: "display_data", data: data ?? { "text/html": "" }, metadata: { ...metadata, [MARK]: this.id } };
    // an output that is removed stays in JupyterLab's file
    if (below) below[0].set(below[1], output);
    else if (table && data) table[0].add(output);
    if (data) this.reveal();
  }

  /** Scrolls to a run that is out of sight, below a long table. */
  reveal() {
    const shown = this.buttons[0]?.closest(".jp-OutputArea")?.lastElementChild;
    requestAnimationFrame(() => shown?.scrollIntoView({ block: "nearest" }));
  }
}

export default () => ({
  initialize({ model }) {
    const notebook = model.widget_manager?.context;
    // JupyterLab and Notebook alone give a page access to the notebook
    if (!notebook?.model?.cells) return undefined;
    const list = new RunList(model, notebook);
    return () => list.close();
  },
});
