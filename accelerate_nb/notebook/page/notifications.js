// A notification of the browser when a long run is over, for a person who has pressed the bell.

import { button, set } from "./elements.js";
import { duration } from "./format.js";
import { elapsed } from "./store.js";

const LONG = 60; // seconds that a run has to take
const KEY = "accelerate-nb-notify";
const BELL = "M8 1.5a4.5 4.5 0 0 0-4.5 4.5v3L2 11.5V12h12v-.5L12.5 9V6A4.5 4.5 0 0 0 8 1.5ZM6.3 13a1.7 1.7 0 0 0 3.4 0Z";

/** What the page remembers; a frame that may remember nothing has forgotten. */
function remembered() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

const isOn = () => window.Notification?.permission === "granted" && remembered() === "on";

function bell() {
  const [svg, path] = ["svg", "path"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  for (const [name, value] of Object.entries({ viewBox: "0 0 16 16", width: 13, height: 13, fill: "currentColor", "aria-hidden": "true" })) svg.setAttribute(name, value);
  path.setAttribute("d", BELL);
  svg.append(path);
  return svg;
}

/** The bell among the buttons of the panel's head; the browser's permission is requested at a press alone. */
export class Bell {
  constructor(view) {
    this.view = view;
    this.element = null;
    this.button = button("anb-plain-btn", bell(), () => this.press());
    set(this.button, "aria-label", "Notify me when the run is over");
    set(this.button, "title", "A notification of the browser when a run of more than a minute is over");
    if (window.Notification) view.head.buttons.prepend(this.button);
  }

  async press() {
    const wanted = !isOn();
    if (wanted && Notification.permission === "default") await Notification.requestPermission();
    const forbidden = wanted && Notification.permission !== "granted";
    if (!forbidden) localStorage.setItem(KEY, wanted ? "on" : "off");
    const text = forbidden ? "The browser does not let this page show notifications: change that in the settings of the site" : `Notifications are ${wanted ? "on" : "off"}`;
    set(this.button, "title", text);
    this.view.announce(text);
    this.draw();
  }

  draw() {
    set(this.button, "aria-pressed", isOn());
  }
}

/** Notifies of the end of a run that took a while; one that several pages show is notified of once. */
export function notifyOfEnd(store) {
  if (!isOn() || elapsed(store) < LONG) return;
  const { run, state, failure, gone } = store;
  const why = failure ? `${failure.rank === null ? "" : `rank ${failure.rank}: `}${failure.type}: ${failure.message}` : gone;
  const body = [`after ${duration(elapsed(store))}`, why].filter(Boolean).join(", ");
  const notification = new Notification(`${run.name} ${state.state}`, { body: body.slice(0, 300), tag: run.folder });
  notification.onclick = () => {
    window.focus();
    [...store.views].at(-1)?.root.scrollIntoView({ block: "nearest" });
  };
}
