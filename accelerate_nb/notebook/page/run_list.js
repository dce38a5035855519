// The table of runs: a press on a row opens its run under the row, another one closes it.

import { h, set, setText } from "./elements.js";
import { matchingOutputs } from "./notebook.js";

const MARK = "accelerate-nb-runs"; // in the metadata of the outputs below the table's own: the run, and the rows after it
const LINK =
  "background:none;border:0;padding:0;font:inherit;color:inherit;text-align:left;text-decoration:underline;cursor:pointer;" +
  "display:block;max-width:100%;overflow:hidden;text-overflow:ellipsis";
const OPEN = "inset 3px 0 0 var(--jp-brand-color1, #1976d2)";

/** A table whose rows open; `opened` is the number of the run that is under its row. */
class RunList {
  constructor(model, notebook) {
    this.model = model;
    this.notebook = notebook;
    this.id = model.get("table");
    this.opened = null;
    this.waits = false;
    this.focused = null; // the number of the row that a press has drawn anew
    this.buttons = new Map();
    this.onMessage = (message) => this.show(message);
    model.on("msg:custom", this.onMessage);
    // the table comes after its widget, and anew where the notebook draws it again
    this.watch = new MutationObserver(() => this.dress());
    this.watch.observe(document.body, { childList: true, subtree: true });
    this.clock = setInterval(() => this.age(), 30000);
    this.dress();
  }

  close() {
    clearInterval(this.clock);
    this.watch.disconnect();
    this.model.off("msg:custom", this.onMessage);
    for (const button of this.buttons.values()) button.disabled = true;
  }

  /** Makes the rows of tables that are new in the page into buttons; a table is in two parts while a run is open. */
  dress() {
    const tables = document.querySelectorAll(`[data-runs="${this.id}"] table:not([data-lm-suppress-shortcuts])`);
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
        row.addEventListener("click", () => document.getSelection().isCollapsed && this.press(number));
        this.buttons.set(number, button);
      }
    }
    if (!tables.length) return;
    this.age();
    this.draw();
    if (this.focused !== null) this.buttons.get(this.focused)?.focus({ preventScroll: true });
  }

  /** "12 min ago", as the kernel writes it; after a day, the date that it wrote. */
  age() {
    for (const cell of document.querySelectorAll(`[data-runs="${this.id}"] [data-at]`)) {
      const seconds = Math.max(0, Math.floor(Date.now() / 1000 - Number(cell.dataset.at)));
      if (seconds >= 86400) setText(cell, cell.title.slice(0, 16));
      else setText(cell, `${seconds >= 3600 ? `${Math.floor(seconds / 3600)} h` : seconds >= 60 ? `${Math.floor(seconds / 60)} min` : `${seconds} s`} ago`);
    }
  }

  press(number) {
    this.focused = number;
    this.opened = number === this.opened ? null : number;
    this.waits = this.opened !== null;
    this.draw();
    this.model.send({ open: this.opened });
  }

  draw() {
    for (const [number, button] of this.buttons) {
      const isOpen = number === this.opened;
      set(button, "aria-expanded", isOpen);
      set(button, "aria-busy", isOpen && this.waits);
      const row = button.closest("tr");
      if (row) row.style.boxShadow = isOpen ? OPEN : "";
    }
  }

  /** Puts the run that the kernel sends into the notebook, between the parts of the table, so that it is saved with them. */
  show({ show, parts, data, metadata }) {
    if (show !== this.opened) return;
    this.waits = false;
    this.draw();
    const find = (matches) => matchingOutputs(this.notebook, matches)[0];
    const table = find((output) => !output.metadata?.[MARK] && String(output.data?.["text/html"]).includes(`data-runs="${this.id}"`));
    if (!table) return;
    const [outputs, index] = table;
    const put = (part, content) => {
      const found = find((output) => output.metadata?.[MARK] === `${this.id} ${part}`);
      // an output that is removed stays in JupyterLab's file
      if (!found && !content.data) return;
      const output = { output_type: "display_data", data: { "text/html": "" }, ...content, metadata: { ...content.metadata, [MARK]: `${this.id} ${part}` } };
      if (found) found[0].set(found[1], output);
      else outputs.add(output);
    };
    if (parts) {
      const own = outputs.get(index).toJSON();
      outputs.set(index, { ...own, data: { ...own.data, "text/html": parts[0] } });
    }
    put("run", data ? { data, metadata } : {});
    if (parts) put("rest", parts[1] ? { data: { "text/html": parts[1] } } : {});
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
