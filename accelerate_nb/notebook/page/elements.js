// Elements of the page: made and changed in one call each; the colours of the notebook's theme; text that leaves the page.

import { SYMBOLS } from "./store.js";

/** An element: `on…` are listeners, other properties attributes (absent when null or false), text goes in as text. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const div = (name, ...children) => h("div", { class: name }, ...children);
export const span = (name, ...children) => h("span", { class: name }, ...children);

/** A cell of a table, with "cell", "rowheader" or "columnheader" for its role. */
export const cell = (role, name, ...inside) => h("div", { class: `anb-cell ${name}`, role }, ...inside);
export const tableRow = (name, ...cells) => h("div", { class: `anb-row ${name}`, role: "row" }, ...cells);

export function button(name, label, onclick, more = {}) {
  return h("button", { type: "button", class: `anb-btn ${name}`, onclick, ...more }, label);
}

// Writing only what changed keeps painting cheap, and leaves a selection alone.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
export function set(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}
export function setStyle(element, name, value) {
  if (element.style[name] !== value) element.style[name] = value;
}
export function show(element, shown) {
  if (element.hidden === shown) element.hidden = !shown;
}

/** Gives a view its `root` in the page, which keeps keys from the notebook, and `announce`, which speaks to those who hear the page. */
export function buildRoot(view, label, ...content) {
  const live = h("div", { class: "anb-sr", role: "status", "aria-live": "polite" });
  view.announce = (text) => live.replaceChildren(text); // also where it is what was said last
  view.root = h(
    "div",
    { class: "anb", role: "region", "aria-label": label, "data-lm-suppress-shortcuts": "true", "data-jp-suppress-context-menu": "true" },
    div("anb-inner", ...content, live),
  );
  keepFromNotebook(view.root);
}

/** The place that an arrow, Home or End leads to from one of so many places in a row, or null for another key. */
export function placeByKey(event, place, size) {
  const goal = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: size - 1 }[event.key];
  if (goal === undefined) return null;
  event.preventDefault();
  return (goal + size) % size;
}

/** Makes "all" and ranks the options of a select, where they are others than before. */
export function setRanks(select, ranks) {
  if (select.dataset.ranks === ranks.join()) return;
  const { value } = select;
  select.dataset.ranks = ranks.join();
  select.replaceChildren(...ranks.map((rank) => h("option", { value: rank }, rank === "all" ? "All ranks" : `Rank ${rank}`)));
  if (ranks.some((rank) => String(rank) === value)) select.value = value;
}

export const escaped = (text) => text.replace(/[&<>"]/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);

/** A button that folds parts of the page away, and back. */
export function foldButton(name, label, isOpen, ...parts) {
  const fold = () => {
    isOpen = !isOpen;
    set(head, "aria-expanded", isOpen);
    for (const part of parts) show(part, isOpen);
  };
  const head = h("button", { type: "button", class: name, "aria-expanded": String(isOpen), onclick: fold }, h("span", { class: "anb-chevron", "aria-hidden": "true" }), label);
  for (const part of parts) show(part, isOpen);
  return head;
}

/** A part of the panel that folds. */
export function section(name, title, tools, ...content) {
  const body = div(`anb-body anb-${name}-body`, ...content);
  const head = foldButton("anb-fold", title, true, body, tools);
  return h("div", { class: `anb-section anb-${name}`, role: "region", "aria-label": title }, div("anb-section-head", head, tools), body);
}

/** A button that unfolds what stands under it. */
export function folded(label, ...content) {
  const inside = div("anb-folded", ...content);
  return div("anb-foldable", foldButton("anb-unfold", label, false, inside), inside);
}

/** Keeps events, those of keys if none are named, from the notebook, which would act on them. */
export function keepFromNotebook(element, ...more) {
  for (const kind of ["keydown", "keyup", "keypress", ...more]) element.addEventListener(kind, (event) => event.stopPropagation());
}

export function chip() {
  const [symbol, text] = [h("span", { class: "anb-symbol", "aria-hidden": "true" }), span("")];
  const element = span("anb-chip", symbol, text);
  return {
    element,
    set(state) {
      set(element, "data-state", state);
      setText(symbol, SYMBOLS[state] ?? "•");
      setText(text, state);
    },
  };
}

/** A small bar, `role="meter"`, and the text beside it. */
export function meter(label) {
  const [fill, beside] = [div("anb-fill"), span("anb-num")];
  const bar = h("div", { class: "anb-meter", role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, fill);
  return {
    element: bar,
    text: beside,
    /** `alarms` says whether nearly all of it is a reason to worry. */
    set(share, text, alarms = true) {
      const percent = Math.round(Math.min(1, Math.max(0, share)) * 100);
      setStyle(fill, "transform", `scaleX(${percent / 100})`);
      set(bar, "aria-valuenow", percent);
      set(bar, "aria-valuetext", text);
      bar.classList.toggle("anb-hot", alarms && share > 0.9);
      setText(beside, alarms && share > 0.9 ? `⚠ ${text}` : text);
    },
  };
}

/** Marks a view as light or dark, by the colour behind it, whatever the notebook calls its themes, and gives it its colours as a canvas takes them, as `palette`; its `key` tells one theme from another. */
export function readTheme(view) {
  const { root } = view;
  if (!root.isConnected) return;
  const style = getComputedStyle(root);
  const colour = (name) => style.getPropertyValue(`--anb-${name}`).trim();
  const [red, green, blue] = pixel(style.backgroundColor);
  set(root, "data-anb-theme", 0.299 * red + 0.587 * green + 0.114 * blue < 128 ? "dark" : "light");
  const ranks = Array.from({ length: 8 }, (_, i) => colour(`c${i}`));
  const [accent, dim, grid, ground, bad] = ["accent", "dim", "line", "bg", "bad"].map(colour);
  view.palette = { ranks, accent, band: `color-mix(in srgb, ${accent} 22%, transparent)`, dim, grid, ground, bad, font: style.fontFamily, key: [accent, dim, grid, ranks[0]].join() };
  for (const chart of view.charts.charts.values()) chart.draw();
}

/** Calls `changed` when the colours of the notebook or of the system may be others; returns what ends that. */
export function watchTheme(changed) {
  const watch = new MutationObserver(changed);
  for (const place of [document.documentElement, document.body]) watch.observe(place, { attributes: true });
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", changed);
  return () => {
    watch.disconnect();
    scheme.removeEventListener("change", changed);
  };
}

/** Red, green and blue of a colour, however it is written. */
function pixel(colour) {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  return pen.getImageData(0, 0, 1, 1).data;
}

/** A button that copies what `text` returns; its view says so. */
export function copyButton(label, text, view, more = {}) {
  const copy = button("anb-plain-btn", label, async () => {
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      // no clipboard on a page served over plain http: the old way
      const area = h("textarea", { "aria-hidden": "true", style: "position:fixed;opacity:0" }, text());
      copy.after(area);
      area.select();
      document.execCommand("copy");
      area.remove();
      copy.focus();
    }
    setText(copy, "Copied");
    view.announce("Copied");
    setTimeout(() => setText(copy, label), 1200);
  }, more);
  return copy;
}

/** Saves a text, bytes or a blob as a file of the person's. */
export function saveFile(name, content) {
  const link = h("a", { href: URL.createObjectURL(new Blob([content])), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
