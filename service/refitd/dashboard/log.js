// The log of decisions, newest first, as it is written: those of one update together, folded but for the newest.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { isNarrow } from "./charts.js";
import { clock, count, words } from "./format.js";
import { loadLog, loadOlderLog } from "./live.js";
import { change } from "./store.js";

const FIRST = 6; // decisions of an open group that are shown at once
const GROUPS = isNarrow() ? 5 : 10;
const OVER = new Set(["RETIRED", "DELETED"]);

/** Show the log of one version or engine, or of everything (null). */
export function showLog(subject) {
  change(({ log }) => Object.assign(log, { subject, items: null, more: null, open: {}, groups: GROUPS }));
  loadLog();
}

/** The run in a version's id. */
const runIn = (id) => id.replace(/~v\d+(\.g\d+)?$/, "").replaceAll("~", "/");

const stepIn = (id) => Number(/~v(\d+)/.exec(id)?.[1] ?? NaN);

/**
 * Events (the newest first) by the update that they belong to: [{key, version, state, events}], the newest first.
 *
 * An event about a version belongs to that version's update; a version that has none is a group of its own. Anything
 * else, deletions too, belongs to the update that its run had at the time; what is about no run stands alone.
 */
export function grouped(events, engines) {
  const runs = new Map(engines.map(({ id, run }) => [id, run]));
  const current = new Map(); // by run: the key of its update at the time
  const groups = new Map();
  const own = new Map(events.filter(({ kind }) => kind === "update").map(({ subject, data }) => [subject, data.number]));
  const keyOf = ({ kind, subject, data }, run) => {
    if (kind === "update") return `update ${data.number}`;
    if (kind === "version" && !OVER.has(data.state)) return own.has(subject) ? `update ${own.get(subject)}` : subject;
    return current.get(run) ?? (run === undefined || run === null ? `${kind} ${subject}` : `before ${run}`);
  };
  for (const event of [...events].reverse()) {
    const { kind, subject, data } = event;
    const run = { engine: runs.get(subject), run: subject }[kind] ?? (kind === "version" || kind === "update" ? runIn(subject) : undefined);
    const key = keyOf(event, run);
    if (kind === "update") current.set(run, key);
    const group = groups.get(key) ?? { key, version: null, state: null, events: [] };
    if (kind === "update" || (kind === "version" && key === subject)) Object.assign(group, { version: subject, state: data.state });
    group.events.unshift(event);
    groups.delete(key); // the group with the newest event comes last
    groups.set(key, group);
  }
  return [...groups.values()].reverse();
}

/** The section. */
export function log({ log: shown, overview }) {
  const { items, more, subject } = shown;
  const groups = items === null || subject !== null ? [] : grouped(items, overview.engines);
  const hidden = groups.length - shown.groups;
  return html`<section id="log" aria-labelledby="log-title" tabindex="-1">
    <div class="bar-of-section">
      <h2 id="log-title">Decisions</h2>
      ${subject === null
        ? nothing
        : html`<span class="told">about ${subject}</span>
            <button type="button" class="quiet" @click=${() => showLog(null)}>Show all</button>`}
    </div>
    ${items === null || items.length === 0 ? html`<p class="empty">${items === null ? "Asking …" : "Nothing yet."}</p>` : nothing}
    ${items === null || items.length === 0 ? nothing : list(subject === null ? groups.slice(0, shown.groups) : [{ key: "", events: items }], shown)}
    ${more === null && hidden <= 0 ? nothing : html`<button type="button" @click=${() => older(hidden)}>Older</button>`}
  </section>`;
}

function older(hidden) {
  change(({ log }) => (log.groups += GROUPS));
  if (hidden < GROUPS) loadOlderLog();
}

const list = (groups, shown) => html`<table class="log">
  <caption class="unseen">Decisions by update, newest first</caption>
  <thead>
    <tr><th scope="col" class="when">When</th><th scope="col" class="about">About</th><th scope="col">What</th></tr>
  </thead>
  ${repeat(groups, ({ key }) => key, (group, index) => body(group, shown, index === 0))}
</table>`;

// The newest group is open, the others are folded, until the user says otherwise.
function body(group, shown, isNewest) {
  const { key, events } = group;
  const isFlat = key === "";
  const how = shown.open[key] ?? (isFlat ? "all" : isNewest && !isNarrow() ? "first" : "folded");
  const visible = { all: events, first: events.slice(0, FIRST), folded: [] }[how];
  const set = (to) => () => change(({ log }) => (log.open = { ...log.open, [key]: to }));
  const rest = events.length - visible.length;
  return html`<tbody>
    ${isFlat ? nothing : head(group, how, set(how === "folded" ? "first" : "folded"))}
    ${visible.map(line)}
    ${how === "first" && rest > 0
      ? html`<tr><td></td><td colspan="2"><button type="button" class="quiet" @click=${set("all")}>and ${count(rest)} more</button></td></tr>`
      : nothing}
  </tbody>`;
}

function head({ key, version, state, events }, how, turn) {
  const step = version === null ? key.replace(/^before /, "earlier, of ") : `step ${count(stepIn(version))}`;
  const title = key.startsWith("update ") && version !== null ? `${key}: ${step}` : step;
  return html`<tr class="group">
    <td><time datetime=${events[0].at}>${clock(events[0].at)}</time></td>
    <th scope="rowgroup" colspan="2">
      <button type="button" class="fold" aria-expanded=${how !== "folded"} @click=${turn}>${title}</button>
      ${state === null ? nothing : html` <span class="tag">${words(state)}</span>`}
      <span class="told">${count(events.length)}<span class="wide"> decision${events.length === 1 ? "" : "s"}</span></span>
    </th>
  </tr>`;
}

const line = (event) => html`<tr>
  <td><time datetime=${event.at}>${clock(event.at)}</time></td>
  <td><button type="button" class="quiet subject" title=${event.subject} @click=${() => showLog(event.subject)}>${event.subject}</button></td>
  <td>${event.text}</td>
</tr>`;
