// Versions, newest first, each with its way to the engines as stages over time.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import * as api from "./api.js";
import { confirm } from "./dialogs.js";
import { showLogOf } from "./engines.js";
import { folded } from "./folded.js";
import { clock, count, plural, size, span } from "./format.js";
import { act, loadVersions, unfold } from "./live.js";
import { mark, stateWord, toneOf } from "./marks.js";
import { pager } from "./pager.js";
import { rollBack } from "./rollback.js";
import { change } from "./store.js";
import { axis, bar, beginOf, legend, ordered, placed, stacked, total } from "./timeline.js";

const SHOWN_ENGINES = 20;

/** The section. */
export function updates({ overview, versions, run, open }) {
  const items = versions.items ?? [];
  const max = Math.max(...items.map((version) => total(version.timings)), 1);
  const runs = overview.runs.map((seen) => seen.run);
  return html`<section aria-labelledby="updates-title">
    <div class="bar-of-section">
      <h2 id="updates-title">Updates</h2>
      ${runs.length > 1 ? choice(runs, run) : nothing}
      ${items.length > 0 ? legend(items) : nothing}
    </div>
    ${versions.items !== null && items.length === 0 ? html`<p class="empty">No versions yet.</p>` : nothing}
    ${items.length === 0 ? nothing : table(items, overview, open, max, runs.length > 1)}
    ${pager({
      what: "versions",
      told: versions.before.length === 0 ? "newest" : `page ${versions.before.length + 1}`,
      canBack: versions.before.length > 0,
      canOn: versions.next !== null,
      turn,
      back: "Newer",
      on: "Older",
    })}
  </section>`;
}

function turn(by) {
  change(({ versions }) => {
    if (by > 0) versions.before.push(versions.next);
    else versions.before.pop();
  });
  loadVersions();
}

function choice(runs, chosen) {
  const choose = (event) => {
    const run = event.target.value || null;
    change((state) => {
      state.run = run;
      state.versions.before = [];
    });
    loadVersions();
  };
  return html`<select aria-label="Run" @change=${choose}>
    <option value="" ?selected=${chosen === null}>all runs</option>
    ${runs.map((run) => html`<option value=${run} ?selected=${run === chosen}>${run}</option>`)}
  </select>`;
}

function table(items, overview, open, max, runs) {
  const targets = new Set(overview.runs.map((seen) => seen.target));
  const where = counted(overview.engines);
  return html`<table class="updates">
    <caption class="unseen">Versions, newest first, with the time that each stage of their updates took</caption>
    <thead>
      <tr>
        <th scope="col">Step</th>
        <th scope="col">State</th>
        ${runs ? html`<th scope="col" class="wide">Run</th>` : nothing}
        <th scope="col" class="stages"><span class="unseen">Stages</span>${axis(max)}</th>
        <th scope="col" class="number">Took</th>
        <th scope="col" class="wide number">Engines</th>
        <th scope="col" class="wide number">Size</th>
        <th scope="col" class="wide number">Seen</th>
      </tr>
    </thead>
    <tbody>
      ${repeat(items, (version) => version.id, (version) => row(version, open, max, runs, targets, where))}
    </tbody>
  </table>`;
}

function row(version, open, max, runs, targets, where) {
  const isOpen = open?.id === version.id;
  const took = total(version.timings);
  return html`<tr class=${isOpen ? "open" : ""}>
      <th scope="row">
        <button type="button" class="fold" aria-expanded=${isOpen} @click=${() => unfold("version", version.id)}
          >${count(version.step)}${version.generation > 1 ? html`<small> gen ${version.generation}</small>` : nothing}</button>
      </th>
      <td>${stateWord(version.glance, version.barred)} ${tags(version, targets)}</td>
      ${runs ? html`<td class="wide">${version.run}</td>` : nothing}
      <td class="stages">${way(version, max)}</td>
      <td class="number">${took > 0 ? span(took) : "–"}</td>
      <td class="wide number">${served(version, where)}</td>
      <td class="wide number">${size(version.bytes)}</td>
      <td class="wide number">${clock(version.created_at)}</td>
    </tr>
    ${isOpen ? detail(version, open, runs ? 8 : 7) : nothing}`;
}

// Of what came no further the reason, whatever stages it has behind it: those it shows unfolded.
function way(version, max) {
  const [stages, tone] = [stacked(version.timings), toneOf(version.glance)];
  const isBad = ["REJECTED", "LOST", "UNKNOWN"].includes(version.state);
  return version.reason !== null && (isBad || (tone !== "good" && stages.length === 0))
    ? html`<span class="cut" title=${version.reason}>${version.reason}</span>`
    : bar(stages, max, `Step ${version.step}`);
}

function tags(version, targets) {
  const said = [];
  if (targets.has(version.id)) said.push("target");
  if (version.pinned) said.push("pinned");
  // No engine goes to what was rejected in any case, and none was there before.
  if (version.barred && (version.state !== "REJECTED" || version.in_memory)) said.push("barred");
  if (version.in_memory) said.push("in memory");
  return said.map((word) => html`<span class="tag">${word}</span> `);
}

// How many engines follow each run, and how many of those that answer serve each version of it: counted once, and not
// sent with each version, where a thousand engines would be most of what is read.
function counted(engines) {
  const [all, there] = [new Map(), new Map()];
  for (const { run, version, known, state } of engines) {
    all.set(run, (all.get(run) ?? 0) + 1);
    if (known && version !== null && state !== "UNREACHABLE") there.set(version, (there.get(version) ?? 0) + 1);
  }
  return { all, there };
}

const served = ({ id, run }, { all, there }) => (all.has(run) ? `${there.get(id) ?? 0}/${all.get(run)}` : "–");

function detail(version, open, columns) {
  const gone = version.state === "DELETED" || version.state === "RETIRED";
  return html`<tr class="detail">
    <td colspan=${columns}>
      ${folded(open.sentences ?? ["Asking …"], 6)}
      ${stageTable(version)} ${loads(version, open)}
      <p class="facts"><span>${version.id}</span><span>${version.path}</span><span>seen ${clock(version.created_at)}</span
        >${Object.entries(version.metadata).map(([name, value]) => html`<span>${name}: ${value}</span>`)}</p>
      <div class="actions">
        ${version.pinned
          ? html`<button type="button" @click=${() => unpin(version)}>Unpin …</button>`
          : html`<button type="button" ?disabled=${gone} @click=${() => pin(version)}>Pin …</button>`}
        <button type="button" ?disabled=${version.state !== "SEALED" || version.barred} @click=${() => rollBack(version.run, version.id)}>
          Roll back to it …
        </button>
        <a href="#log" @click=${() => showLogOf(version.id)}>Its log</a>
      </div>
    </td>
  </tr>`;
}

function stageTable(version) {
  const stages = ordered(version.timings);
  if (stages.length === 0) return nothing;
  return html`<dl class="stage-times">
    ${stages.map(({ name, ms }) => html`<div><dt>${name}</dt><dd>${span(ms)}</dd></div>`)}
  </dl>`;
}

// Each engine on the time line of this update, the slowest first. An engine may have needed several loads.
function loads(version, open) {
  if (open.attempts === null || open.attempts.length === 0) return nothing;
  const begin = beginOf(version);
  const lines = open.attempts.map((load) => ({ load, stages: placed(load, begin) }));
  const end = ({ load, stages }) => (stages.length > 0 ? stages.at(-1).at + stages.at(-1).ms : Date.parse(load.started_at) - begin);
  lines.sort((one, other) => end(other) - end(one));
  const first = Math.min(...lines.map(({ stages }) => stages[0]?.at ?? Infinity));
  const from = Number.isFinite(first) ? first : 0;
  const max = Math.max(...lines.map(end)) - from || 1;
  const all = open.all || lines.length <= SHOWN_ENGINES;
  const shown = all ? lines : lines.slice(0, SHOWN_ENGINES);
  return html`<table class="loads">
    <caption>${plural(lines.length, "load")}, the last to end first; the first began ${span(from)} after the update</caption>
    <thead>
      <tr><th scope="col">Engine</th><th scope="col" class="stages">${axis(max)}<span class="unseen">Stages</span></th>
        <th scope="col" class="number">Took</th><th scope="col">Outcome</th></tr>
    </thead>
    <tbody>
      ${shown.map(
        ({ load, stages }) => html`<tr>
          <th scope="row">${load.engine}</th>
          <td class="stages">${bar(stages.map((stage) => ({ ...stage, at: stage.at - from })), max, load.engine)}</td>
          <td class="number">${load.outcome === null ? "–" : span(total(load.timings))}</td>
          <td>${outcome(load)}</td>
        </tr>`,
      )}
    </tbody>
  </table>
  ${all ? nothing : html`<button type="button" @click=${() => change(() => (open.all = true))}>Show all ${lines.length}</button>`}`;
}

function outcome({ outcome, reason }) {
  const states = { ACK: "IN_SYNC", NACK: "NACKED", TAINTED: "TAINTED", UNREACHABLE: "UNREACHABLE", NOT_SENT: "gone" };
  return html`<span class="state">${mark(outcome === null ? "UPDATING" : states[outcome])}<span>${outcome ?? "under way"}</span></span>
    ${reason ?? ""}`;
}

async function pin(version) {
  const detail = html`<p>Step ${count(version.step)} (${size(version.bytes)}) is kept until you unpin it, whatever the keep
    rules say.</p>`;
  if (await confirm({ title: "Pin?", detail, verb: "Pin" })) {
    await act(`${version.id} is pinned.`, () => api.pin(version.id));
  }
}

async function unpin(version) {
  const detail = html`<p>The keep rules decide about step ${count(version.step)} again. It may be deleted at once.</p>`;
  if (await confirm({ title: "Unpin?", detail, verb: "Unpin" })) {
    await act(`${version.id} is not pinned any more.`, () => api.unpin(version.id));
  }
}
