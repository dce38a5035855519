// Controls that several parts of the panel use: folding sections, chips of states, meters.

import { div, h, setText, set, setStyle, show, span } from "./elements.js";
import { SYMBOLS } from "./states.js";

/** A part of the panel that folds: its head is a button. */
export function section(name, title, tools, ...content) {
  const body = div(`anb-body anb-${name}-body`, ...content);
  const head = h("button", { type: "button", class: "anb-fold", "aria-expanded": "true" }, h("span", { class: "anb-chevron", "aria-hidden": "true" }), title);
  head.addEventListener("click", () => {
    const open = head.getAttribute("aria-expanded") !== "true";
    set(head, "aria-expanded", open);
    show(body, open);
    show(tools, open);
  });
  return h("div", { class: `anb-section anb-${name}`, role: "region", "aria-label": title }, div("anb-section-head", head, tools), body);
}

/** A button that unfolds what stands under it. */
export function folded(label, ...content) {
  const inside = div("anb-folded", ...content);
  inside.hidden = true;
  const head = h("button", { type: "button", class: "anb-unfold", "aria-expanded": "false" }, h("span", { class: "anb-chevron", "aria-hidden": "true" }), label);
  head.addEventListener("click", () => {
    const open = head.getAttribute("aria-expanded") !== "true";
    set(head, "aria-expanded", open);
    show(inside, open);
  });
  return div("anb-foldable", head, inside);
}

export function chip() {
  const [symbol, text] = [h("span", { class: "anb-symbol", "aria-hidden": "true" }), span("")];
  const element = span("anb-chip", symbol, text);
  return {
    element,
    set(state) {
      if (element.dataset.state === state) return;
      element.dataset.state = state;
      setText(symbol, SYMBOLS[state] ?? "•");
      setText(text, state);
    },
  };
}

/** A small bar with its text: `role="meter"`. */
export function meter(label) {
  const fill = div("anb-fill");
  const bar = h("div", { class: "anb-meter", role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, fill);
  return {
    element: bar,
    /** `alarms` says whether nearly all of it is a reason to worry. */
    set(share, text, alarms = true) {
      const percent = Math.round(Math.min(1, Math.max(0, share)) * 100);
      setStyle(fill, "transform", `scaleX(${percent / 100})`);
      set(bar, "aria-valuenow", percent);
      set(bar, "aria-valuetext", text);
      bar.classList.toggle("anb-hot", alarms && share > 0.9);
    },
  };
}
