// Elements of the page: made and changed in one call each; text goes in as text, and only what changed is written.

const listeners = /^on[a-z]/;

/** An element: `on…` are listeners, other properties attributes (absent when null or false), text goes in as text. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (listeners.test(name)) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const div = (name, ...children) => h("div", { class: name }, ...children);
export const span = (name, ...children) => h("span", { class: name }, ...children);

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

/** A text as HTML. */
export const escaped = (text) => text.replace(/[&<>"]/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);
