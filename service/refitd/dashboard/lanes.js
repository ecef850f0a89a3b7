// A lane for each engine: which step it served when, its loads, and the times for which it was away.

import { html, nothing, svg } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { isNarrow } from "./charts.js";
import { chosen } from "./fleet.js";
import { clock, count, plural, span, words } from "./format.js";
import { pager } from "./pager.js";
import { change, state as store } from "./store.js";
import { at } from "./window.js";

const CAPITAL = 8.2; // pixels of a capital letter, and some more
const APART = 4; // pixels between loads that are marked
const TAIL = 6; // characters of a long name that stay: of host and port, engines of one host differ in the port
const FEW = 4;
const MANY = 12;
const GOOD = new Set(["SEALED", "RETIRED", "DELETED"]);
const UNKNOWN = { loads: [], outages: [] }; // of an engine whose past is still asked for; its lane has its place

/** The engines that have a lane now: a page of those that are looked at, in the order of their names. */
export function laneEngines({ overview, engines: filter, history: past, run }) {
  const found = chosen(overview?.engines ?? [], filter).filter((engine) => run === null || engine.run === run);
  const mine = found.sort((one, other) => one.id.localeCompare(other.id, "en", { numeric: true }));
  const most = isNarrow() ? FEW : MANY;
  const page = Math.min(past.page, Math.max(0, Math.ceil(mine.length / most) - 1));
  return { mine, most, page, here: mine.slice(page * most, (page + 1) * most) };
}

/** When loads and outages of the lanes' engines ended, as far as they have. */
export const laneMoments = () =>
  Object.values(store.history.lanes).flatMap(({ loads, outages }) => [
    ...loads.slice(-1).map((load) => Date.parse(load.at) + (load.ms ?? 0)),
    ...outages.slice(-1).map((outage) => Date.parse(outage.until ?? outage.since)),
  ]);

/** The lanes, or nothing where there are no engines. */
export function lanes(state, updates, view) {
  const { mine, most, page, here } = laneEngines(state);
  if (mine.length === 0) return nothing;
  if (here.some((engine) => state.history.lanes[engine.id] === undefined)) dispatchEvent(new CustomEvent("lanes-wanted"));
  return html`<div class="lanes">
    <h3 class="unseen">Engines over time</h3>
    <svg class="unseen" aria-hidden="true"><defs>
      <pattern id="away" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
        <rect class="away-ground" width="6" height="6" /><rect class="away-line" width="2.5" height="6" />
      </pattern>
    </defs></svg>
    <ul>
      ${repeat(here, (engine) => engine.id, (engine) => lane(engine, state.history, updates, view))}
    </ul>
    ${legend()}
    ${pager({
      what: "lanes",
      told: `engines ${page * most + 1} – ${page * most + here.length} of ${count(mine.length)}`,
      canBack: page > 0,
      canOn: (page + 1) * most < mine.length,
      turn: (by) => change(({ history: past }) => (past.page = page + by)),
    })}
  </div>`;
}

const legend = () => html`<ul class="legend" aria-label="Lanes of engines">
  ${[
    ["served", "newest step"],
    ["served late-1", "1 behind"],
    ["served late-2", "2 or more"],
    ["loading", "load"],
    ["away", "away, or contents unknown"],
  ].map(
    ([kind, text]) => html`<li><svg class="key line" viewBox="0 0 18 12" aria-hidden="true">
      ${kind === "away"
        ? svg`<rect width="18" height="12" fill="url(#away)" />`
        : svg`<rect class=${kind} x=${kind === "loading" ? 7 : 0} width=${kind === "loading" ? 3 : 18} height="12" />`}
    </svg>${text}</li>`,
  )}
</ul>`;

function lane(engine, { lanes, width }, updates, view) {
  const past = lanes[engine.id] ?? UNKNOWN;
  const scale = (width ?? 800) / (view.to - view.from);
  const place = (from, to) => clipped((from - view.from) * scale, (to - view.from) * scale, width ?? 800);
  const mine = updates.filter((update) => update.run === engine.run && GOOD.has(update.state));
  const end = Math.max(view.to, Date.parse(past.loads.at(-1)?.at ?? 0));
  const served = stretches(past, mine, end);
  const away = past.outages
    .map((outage) => ({
      ...outage,
      box: place(Date.parse(outage.since), outage.until === null ? view.to : Date.parse(outage.until)),
    }))
    .filter(({ box }) => box !== null);
  const isFree = (x, width) => !away.some(({ box }) => box.x < x + width && box.x + box.width > x);
  return html`<li>
    <span class="name" title=${engine.id}><span>${engine.id.slice(0, -TAIL)}</span><span>${engine.id.slice(-TAIL)}</span></span>
    <svg role="img" aria-label=${past === UNKNOWN ? `${engine.id}: asking …` : inWords(engine, past, view)} width=${width ?? 800} height="22">
      ${served.map((stretch) => servedRect(stretch, place, isFree))}
      ${past.loads.map((load, index) => loadRect(load, place, (sinceLast(past.loads, index) ?? Infinity) * scale < APART))}
      ${away.map(awayRect)}
    </svg>
  </li>`;
}

const sinceLast = (loads, index) =>
  index === 0 ? null : Date.parse(loads[index].at) - Date.parse(loads[index - 1].at);

/** Where a stretch lies, {x, width} in pixels, null where it is out of sight. */
function clipped(from, to, width) {
  const x = Math.max(0, from);
  const end = Math.min(width, to);
  return end < 0 || x > width || end < x ? null : { x, width: end - x };
}

/** What an engine served from when to when: [{step, from, to, behind}], cut where a newer step was published. */
export function stretches({ loads, outages }, updates, end) {
  const order = new Map(updates.map(({ id }, index) => [id, index]));
  const published = updates.map(at);
  const taken = loads.filter(({ outcome, ms }) => outcome === "ACK" && ms !== null);
  const unknown = outages.filter(({ state }) => state === "TAINTED" || state === "QUARANTINED");
  return taken.flatMap((load, index) => {
    const from = Date.parse(load.at) + load.ms;
    const next = index + 1 < taken.length ? Date.parse(taken[index + 1].at) + taken[index + 1].ms : end;
    const lost = unknown.map(({ since }) => Date.parse(since)).filter((since) => since > from && since < next);
    const to = Math.min(next, ...lost);
    const own = order.get(load.version);
    if (own === undefined) return [{ step: load.step, from, to, behind: 0 }];
    // It falls behind by one step with each that is published after its own.
    const cuts = [from];
    for (let newer = own + 1; newer < published.length && published[newer] < to; newer += 1) {
      if (newer - own > 2) break;
      if (published[newer] > from) cuts.push(published[newer]);
    }
    const behindAt = (moment) => published.slice(own + 1).filter((each) => each <= moment).length;
    return cuts.map((cut, place) => ({ step: load.step, from: cut, to: cuts[place + 1] ?? to, behind: behindAt(cut) }));
  });
}

function servedRect({ step, from, to, behind }, place, isFree) {
  const box = place(from, to);
  if (box === null || box.width < 0.5) return nothing;
  const kind = behind === 0 ? "served" : behind === 1 ? "served late-1" : "served late-2";
  const late = behind === 0 ? "the newest" : `${plural(behind, "step")} behind`;
  const text = count(step);
  const room = 12 + text.length * 7;
  return svg`<g><title>serves step ${text}, ${late}, from ${clock(from)}</title>
    <rect class=${kind} x=${box.x} width=${box.width} y="4" height="14" />
    ${box.width > room && isFree(box.x, room)
      ? svg`<text x=${box.x + 6} y="15">${text}</text>`
      : nothing}</g>`;
}

function loadRect({ at: began, ms, outcome, reason, step }, place, isCrowded) {
  const from = Date.parse(began);
  const box = place(from, from + (ms ?? 0));
  if (box === null) return nothing;
  const text = `${outcome === null ? "loads" : outcome === "ACK" ? "loaded" : `${outcome}: could not load`} step ${count(step)}${
    ms === null ? "" : ` in ${span(ms)}`}${reason === null ? "" : `: ${reason}`}`;
  if (outcome === null || outcome === "ACK") {
    if (isCrowded) return nothing;
    return svg`<rect class="loading" x=${box.x} width=${Math.max(box.width, 1.5)} y="1" height="20"><title>${text}</title></rect>`;
  }
  const x = box.x;
  return svg`<g><title>${text}</title><path class="of-bad" d="M${x - 4} 7l8 8m0-8-8 8" stroke-width="2" /></g>`;
}

function awayRect({ box, state, reason, since }) {
  const text = words(state);
  const width = Math.max(box.width, 2);
  return svg`<g><title>${text} since ${clock(since)}: ${reason}</title>
    <rect x=${box.x} width=${width} y="4" height="14" fill="url(#away)" />
    ${width > 24 + text.length * CAPITAL
      ? svg`<rect class="plate" x=${box.x + 6} y="4" width=${text.length * CAPITAL + 8} height="14" />
          <text class="lost" x=${box.x + 10} y="15">${text}</text>`
      : nothing}</g>`;
}

function inWords(engine, { loads, outages }, view) {
  const inView = loads.filter((load) => Date.parse(load.at) >= view.from && Date.parse(load.at) <= view.to);
  const lost = inView.filter(({ outcome }) => outcome !== null && outcome !== "ACK").length;
  const serves = engine.step === null ? (engine.host ? "no version that is known here" : "start-up weights") : `step ${count(engine.step)}`;
  return `${engine.id}: serves ${serves}; ${plural(inView.length, "load")} in sight, ${count(lost)} failed, ${plural(outages.length, "outage")}`;
}
