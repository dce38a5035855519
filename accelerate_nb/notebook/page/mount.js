// The panel in a place of a page, with a kernel behind it or from messages alone.

import { feed, makeStore } from "./store.js";
import { View } from "./view.js";

/** `liveParts` are classes of parts that only a view with a kernel has. */
export function openView(store, el, send, liveParts = []) {
  const view = new View(store, send, liveParts);
  store.views.add(view);
  el.append(view.root);
  view.draw();
  return view;
}

/** The panel from messages alone, without a kernel: what a saved notebook shows. Returns what takes it away. */
export function mount(el, messages, css) {
  const store = makeStore();
  for (const message of messages) feed(store, message);
  if (css) el.append(Object.assign(document.createElement("style"), { textContent: css }));
  const view = openView(store, el, null);
  return () => view.close();
}
