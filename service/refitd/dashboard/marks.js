// A shape for each state, so that no state is told by its colour alone. The word stands beside it.

import { html, svg } from "./vendor/lit-html/lit-html.js";
import { words } from "./format.js";

const SHAPES = {
  full: svg`<circle cx="6" cy="6" r="4.5" />`,
  ring: svg`<circle class="line" cx="6" cy="6" r="4" />`,
  dots: svg`<circle class="line dotted" cx="6" cy="6" r="4" />`,
  half: svg`<circle class="line" cx="6" cy="6" r="4" /><path d="M6 2a4 4 0 0 1 0 8z" />`,
  arrow: svg`<path d="M2.5 1.5 10.5 6l-8 4.5z" />`,
  tick: svg`<path class="line" d="M1.5 6.5 4.5 9.5 10.5 2.5" />`,
  bars: svg`<path d="M2.5 1.5h2.6v9H2.5zM6.9 1.5h2.6v9H6.9z" />`,
  triangle: svg`<path d="M6 .8 11.6 11H.4z" />`,
  cross: svg`<path class="line" d="m2 2 8 8M10 2l-8 8" />`,
  square: svg`<path d="M1.5 1.5h9v9h-9z" />`,
  diamond: svg`<path d="M6 .2 11.8 6 6 11.8.2 6z" />`,
  stop: svg`<path d="M3.7.5h4.6l3.2 3.2v4.6l-3.2 3.2H3.7L.5 8.3V3.7z" />`,
  back: svg`<path d="M9.5 1.5 1.5 6l8 4.5z" />`,
  dash: svg`<path class="line" d="M2 6h8" />`,
};

// The shape and the tone of each state. Tones: good, busy, bad, over.
const MARKS = {
  "in sync": ["full", "good"],
  updating: ["arrow", "busy"],
  away: ["cross", "bad"],
  troubled: ["triangle", "bad"],

  arriving: ["half", "busy"],
  good: ["full", "good"],
  rejected: ["square", "bad"],
  gone: ["dash", "over"],

  // The engines of a host, and loads, are shown by their own states.
  IN_SYNC: ["full", "good"],
  PROBING: ["dots", "busy"],
  BEHIND: ["half", "busy"],
  UPDATING: ["arrow", "busy"],
  VERIFYING: ["tick", "busy"],
  NACKED: ["square", "bad"],
  TAINTED: ["diamond", "bad"],
  UNREACHABLE: ["cross", "bad"],
  QUARANTINED: ["stop", "bad"],
  CONTESTED: ["triangle", "bad"],

  CURRENT: ["full", "good"],
  MOVING: ["arrow", "busy"],
  PAUSED: ["bars", "busy"],
  ROLLED_BACK: ["back", "over"],
  UNFOLLOWED: ["ring", "bad"],
  TROUBLED: ["triangle", "bad"],
  CLOSED: ["dash", "over"],

  live: ["full", "good"],
  connecting: ["dots", "busy"],
  lost: ["cross", "bad"],
  refused: ["stop", "bad"],
};

export const toneOf = (state) => (MARKS[state] ?? ["ring", "busy"])[1];

/** The shape alone, for where the word stands beside it. */
export function mark(state) {
  const [shape, tone] = MARKS[state] ?? ["ring", "busy"];
  return html`<svg class="mark ${tone}" viewBox="0 0 12 12" aria-hidden="true">${SHAPES[shape]}</svg>`;
}

/** Shape and word. What was good and is barred looks like what is over. */
export function stateWord(state, barred = false) {
  const looks = barred && toneOf(state) === "good" ? "gone" : state;
  return html`<span class="state ${toneOf(looks)}">${mark(looks)}<span>${words(state)}</span></span>`;
}
