// A fleet at a glance: one small cell for each engine, in the order of their names.

import { html } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { count, plural } from "./format.js";
import { mark, toneOf } from "./marks.js";

export const CROWD = 24; // engines from which on there is a grid
const MANY = 300; // from which on cells are smaller, for those who have a mouse
const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

/** The grid of `engines`; `choose` is called with the id of the engine that is clicked, `chosen` is the id shown. */
export function grid(engines, chosen, choose) {
  const sorted = [...engines].sort((one, other) => one.id.localeCompare(other.id, "en", { numeric: true }));
  const entry = sorted.some(({ id }) => id === chosen) ? chosen : sorted[0].id;
  return html`<ul class="grid ${engines.length > MANY ? "dense" : ""}" aria-label="All engines; arrow keys go from one to the next" @keydown=${walk}>
    ${repeat(sorted, ({ id }) => id, (engine) => cell(engine, engine.id === chosen, engine.id === entry, choose))}
  </ul>`;
}

function cell(engine, isChosen, isEntry, choose) {
  const late = engine.behind === null ? "" : engine.behind === 0 ? "" : `, ${plural(engine.behind, "step")} behind`;
  const serves = engine.step === null ? "" : `, step ${count(engine.step)}`;
  const text = `${engine.id}: ${engine.glance}${serves}${late}`;
  const tone = engine.behind > 0 && toneOf(engine.glance) === "good" ? "busy" : toneOf(engine.glance);
  // One cell takes part in the order of tabs: arrow keys lead to the others.
  return html`<li>
    <button type="button" class=${tone} title=${text} aria-label=${text} aria-pressed=${isChosen} tabindex=${isEntry ? 0 : -1}
      @click=${() => choose(engine.id)}>${mark(engine.glance)}</button>
  </li>`;
}

function walk(event) {
  const by = STEPS[event.key];
  if (by === undefined) return;
  const cells = [...event.currentTarget.querySelectorAll("button")];
  const now = cells.indexOf(document.activeElement);
  const next = Math.min(Math.max(now + by, 0), cells.length - 1);
  cells[next].focus();
  event.preventDefault();
}
