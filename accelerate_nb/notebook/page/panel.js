// The live panel of a run, hung into a page: by anywidget with a kernel behind it, or from messages alone.
//
// The store belongs to the widget's model, so that every view of it shows the same; a view belongs to one place in the page.

import { saveFile } from "./copying.js";
import { leave } from "./leaving.js";
import { acknowledge, feed, makeStore } from "./store.js";
import { View } from "./view.js";

function openView(store, el, send) {
  const view = new View(store, send);
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

// A function, called once for a model: `initialize` and `render` are given different objects for the model, and share this.
export default () => {
  const store = makeStore();

  function initialize({ model }) {
    for (const message of model.get("snapshot") ?? []) feed(store, message);
    const send = (message) => model.send(message);
    const hear = (message, buffers) => {
      if (message.log) saveFile(message.log, buffers);
      if (message.report) leave(message.report, model.widget_manager?.context);
      feed(store, message);
      // also where the page's timers sleep, in a tab in the background
      if (store.views.size) acknowledge(store, send);
    };
    model.on("msg:custom", hear);
    return () => model.off("msg:custom", hear);
  }

  function render({ model, el }) {
    const view = openView(store, el, (message) => model.send(message));
    model.send({ do: "hello", view: view.id, seq: store.seq });
    return () => view.close();
  }

  return { initialize, render };
};
