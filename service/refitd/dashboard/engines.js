// The fleet: what each engine serves, how far behind it is, and why. Those that need an operator come first.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import * as api from "./api.js";
import { confirm } from "./dialogs.js";
import { ORDER, chosen } from "./fleet.js";
import { folded } from "./folded.js";
import { CROWD, grid } from "./grid.js";
import { clock, count, plural, span, words } from "./format.js";
import { act, unfold } from "./live.js";
import { mark, stateWord } from "./marks.js";
import { moveEngine } from "./move.js";
import { pager } from "./pager.js";
import { ENGINES_PAGE, change } from "./store.js";
import { bar, placed, total } from "./timeline.js";

const CROWD_PAGE = 8;

/** The section. */
export function engines({ overview, engines: filter, open }) {
  const all = overview.engines;
  const found = chosen(all, filter);
  const isCrowd = all.length >= CROWD;
  const rows = isCrowd ? CROWD_PAGE : ENGINES_PAGE; // the grid shows the others
  const pages = Math.max(1, Math.ceil(found.length / rows));
  const page = Math.min(filter.page, pages - 1);
  const first = page * rows;
  const shown = found.slice(first, first + rows);
  const runs = new Set(all.map((engine) => engine.run)).size > 1;
  const max = Math.max(...shown.map((engine) => total(engine.last_attempt?.timings ?? {})), 1);
  return html`<section aria-labelledby="engines-title">
    <div class="bar-of-section">
      <h2 id="engines-title">Engines</h2>
      ${states(all, filter)}
      ${all.length > 8 ? search(filter) : nothing}
    </div>
    ${isCrowd ? grid(all, filter.only, chooseOne) : nothing}
    ${all.length === 0
      ? html`<p class="empty">No engines. Start the service with <code>--engine URL</code>, or
          <code>refitd engines add URL</code>.</p>`
      : html`<table class="engines">
          <caption class="unseen">Engines, those that need an operator first</caption>
          <thead>
            <tr>
              <th scope="col">Engine</th>
              <th scope="col">State</th>
              ${runs ? html`<th scope="col" class="wide">Run</th>` : nothing}
              <th scope="col" class="number">Step</th>
              <th scope="col" class="number">Behind</th>
              <th scope="col" class="wide load">Last load</th>
              <th scope="col" class="wide number">Took</th>
              <th scope="col" class="wide why">Why</th>
            </tr>
          </thead>
          <tbody>
            ${repeat(shown, (engine) => engine.id, (engine) => row(engine, open, runs, max, overview.runs))}
          </tbody>
        </table>`}
    ${found.length === 0 && all.length > 0 ? html`<p class="empty">No engine is like that.</p>` : nothing}
    ${pager({
      what: "engines",
      told: `${first + 1} – ${first + shown.length} of ${count(found.length)}`,
      canBack: page > 0,
      canOn: page < pages - 1,
      turn: (by) => change((state) => (state.engines.page = page + by)),
    })}
  </section>`;
}

function states(all, filter) {
  const counts = ORDER.map((state) => [state, all.filter((engine) => engine.glance === state).length]);
  const choose = (state) => () => change(({ engines }) => Object.assign(engines, { state, only: null, page: 0 }));
  return html`<div class="chips" role="group" aria-label="Show engines by state">
    <button type="button" aria-pressed=${filter.state === null && filter.only === null} @click=${choose(null)}>all ${count(all.length)}</button>
    ${counts
      .filter(([state, number]) => number > 0 || state === filter.state)
      .map(
        ([state, number]) =>
          html`<button type="button" aria-pressed=${filter.state === state} @click=${choose(state)}>
            ${mark(state)}${words(state)} ${count(number)}
          </button>`,
      )}
  </div>`;
}

// A cell of the grid that is clicked again lets all engines be shown again.
const chooseOne = (id) =>
  change(({ engines }) => Object.assign(engines, { state: null, text: "", only: engines.only === id ? null : id, page: 0 }));

function search(filter) {
  const take = (event) => {
    const text = event.target.value;
    change(({ engines }) => Object.assign(engines, { text, only: null, page: 0 }));
  };
  return html`<input type="search" aria-label="Search engines" placeholder="name, address, reason" .value=${filter.text}
    @input=${take} />`;
}

function row(engine, open, runs, max, seen) {
  const isOpen = open?.id === engine.id;
  const load = engine.last_attempt;
  return html`<tr class=${isOpen ? "open" : ""}>
      <th scope="row">
        <button type="button" class="fold" aria-expanded=${isOpen} @click=${() => unfold("engine", engine.id)}
          >${engine.id}</button>${notSglang(engine) ? html` <span class="tag">${engine.server}</span>` : nothing}
      </th>
      <td>${stateWord(engine.glance)}${engine.paused ? html` <span class="tag">${mark("PAUSED")}paused</span>` : nothing}${engine.in_memory
        ? html` <span class="tag">in memory</span>`
        : nothing}</td>
      ${runs ? html`<td class="wide">${engine.run ?? "–"}</td>` : nothing}
      <td class="number">${step(engine)}</td>
      <td class="number">${behind(engine)}</td>
      <td class="wide load">${load === null ? "–" : lastLoad(load, max)}</td>
      <td class="wide number">${load === null ? "–" : span(load.outcome === null ? null : total(load.timings))}</td>
      <td class="wide why">${why(engine)}</td>
    </tr>
    ${isOpen ? detail(engine, open, runs ? 8 : 7, seen) : nothing}`;
}

const lastLoad = (load, max) => bar(placed(load, Date.parse(load.started_at)), max, `Load of ${load.version}`);

// Of one that does not answer also since when, and for how long; of one whose loads are slow, why.
function why({ state, glance, reason, url, unreachable_since: since, loads_whole: whole, through_loader: slow, server, draft, host }) {
  if (glance === "troubled") return `${words(state)}: ${reason ?? "no reason is known"}`;
  if (since === null && host) return reason === null ? ofHost(host) : `${reason}; ${ofHost(host)}`;
  if (since === null) return reason ?? (whole ? `each load goes through ${server}'s loader: ${slow}` : draft ? `draft: ${draft}` : "");
  const told = (reason ?? "").replace(`${url} cannot be reached: `, "");
  return `since ${clock(since)} (${span(Math.max(0, Date.now() - Date.parse(since)))})${told === "" ? "" : `: ${told}`}`;
}

// Before anything was published an engine serves what it was started with; a host may serve what this service never had.
function step(engine) {
  if (engine.step !== null) return count(engine.step);
  return engine.state === "IN_SYNC" && !engine.host ? "start-up" : "–";
}

function behind(engine) {
  if (engine.behind === null) return engine.known ? "–" : "unknown contents";
  return engine.behind === 0 ? "0" : html`<b>${plural(engine.behind, "step")}</b>`;
}

const notSglang = ({ server }) => ![null, "SGLang"].includes(server);

// How many engines a host has in each state.
const ofHost = (host) =>
  `engines there: ${Object.entries(host.states).map(([state, number]) => `${count(number)} ${words(state)}`).join(", ")}`;

// The engines of a host that it names one by one.
function hosted({ host }) {
  if (!host) return nothing;
  const left = Object.values(host.states).reduce((sum, number) => sum + number, 0) - host.engines.length;
  return html`<ul class="hosted">
    ${host.engines.map(
      ({ id, state, version, reason, paused }) =>
        html`<li>${stateWord(state)} ${id}: ${version ?? "no version"}${paused ? ", paused" : ""}${reason ? html` – ${reason}` : nothing}</li>`,
    )}
    ${left > 0 ? html`<li>and ${plural(left, "more engine")}</li>` : nothing}
  </ul>`;
}

// Server, release, whether refitd is inside, and what proves its contents.
function whatItIs({ server, server_version: release, plugin, version, proof, host }) {
  if (server === null) return nothing;
  const kind = host ? "a host with engines of its own" : plugin === null ? "stock" : `with refitd ${plugin} inside`;
  const proved = version === null ? nothing : html`<span>proof: ${proof ?? "none"}</span>`;
  return html`<span>${server} ${release ?? ""}, ${kind}</span>${proved}`;
}

function detail(engine, open, columns, seen) {
  const load = engine.last_attempt;
  return html`<tr class="detail">
    <td colspan=${columns}>
      ${folded(open.sentences ?? ["Asking …"], 6)}
      ${hosted(engine)}
      <p class="facts"><span>${engine.url}</span>${whatItIs(engine)}${load === null ? nothing : html`<span>last load at ${clock(load.started_at)}</span>`}
        ${engine.skipped > 0 ? html`<span>passed over ${plural(engine.skipped, "good version")}</span>` : nothing}</p>
      <div class="actions">
        <button type="button" @click=${() => resync(engine)}>Resync …</button>
        <button type="button" @click=${() => moveEngine(engine, seen)}>Move …</button>
        <a href="#log" @click=${() => showLogOf(engine.id)}>Its log</a>
      </div>
    </td>
  </tr>`;
}

export function showLogOf(subject) {
  dispatchEvent(new CustomEvent("show-log", { detail: subject }));
}

async function resync(engine) {
  const when = engine.state === "UNREACHABLE" ? " when it is reachable" : "";
  const detail = html`<p><b>${engine.id}</b> will be loaded again${when}, whatever it claims to serve; it pauses for that.
    This ends a quarantine.</p>`;
  if (await confirm({ title: "Resync?", detail, verb: "Resync" })) {
    await act(`${engine.id} will be loaded${when}.`, () => api.resync(engine.id));
  }
}
