// The error that leads: its sentence, the person's own lines, what to do, and what the others said.

import { plain } from "./ansi.js";
import { copyButton } from "./text_export.js";
import { div, h, span } from "./elements.js";
import { folded } from "./controls.js";

/** The error that leads: its sentence, the person's own lines, what to do, and what the others said. */
export function failureView(failure, announce) {
  const traceback = h("pre", { class: "anb-pre", tabindex: "0", role: "group", "aria-label": "traceback" }, plain(failure.traceback || ""));
  const ofRun = failure.rank === null; // its time was over, and no rank's fault
  const others = failure.others ?? [];
  const lines = failure.last_lines ?? [];
  return h(
    "div",
    { class: "anb-failure", role: "region", "aria-label": "The error" },
    div(
      "anb-failure-head",
      ofRun ? null : span(`anb-rank anb-r${failure.rank % 8}`, `rank ${failure.rank}`),
      span("anb-failure-type", failure.type),
      span("anb-failure-message", failure.message),
    ),
    failure.advice ? div("anb-advice", h("span", { class: "anb-advice-mark", "aria-hidden": "true" }, "→"), span("", failure.advice)) : null,
    ...frameRuns(failure.frames ?? []),
    lines.length ? div("anb-last", div("anb-caption", "Its last lines"), h("pre", { class: "anb-pre", tabindex: "0", role: "group", "aria-label": "last lines" }, lines.map(plain).join("\n"))) : null,
    others.length ? div("anb-others", div("anb-caption", "The other ranks"), ...others.map((text) => div("anb-other", text))) : null,
    failure.traceback ? folded(ofRun ? "Every rank's stack" : "Whole traceback", traceback, copyButton("Copy", () => plain(failure.traceback), announce)) : null,
  );
}

/** Own frames stand open; frames of others that follow each other are folded into one line. */
function frameRuns(frames) {
  const parts = [];
  let strange = [];
  const guilty = [...frames].reverse().find((frame) => frame[3]);
  const fold = () => {
    if (strange.length) parts.push(folded(`${strange.length} ${strange.length === 1 ? "call" : "calls"} in other code`, ...strange.map(frameView)));
    strange = [];
  };
  for (const frame of frames) {
    if (!frame[3]) strange.push(frame);
    else {
      fold();
      parts.push(frameView(frame));
      parts.at(-1).classList.toggle("anb-guilty", frame === guilty);
    }
  }
  fold();
  return parts;
}

function frameView([place, name, source, own]) {
  return div(
    own ? "anb-frame anb-own" : "anb-frame",
    div("anb-frame-place", span("anb-place", place), name ? span("anb-in", ` in ${name}`) : null),
    source ? h("code", { class: "anb-source" }, source) : null,
  );
}
