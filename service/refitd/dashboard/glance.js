// The top of the page: is the stream live, is the service well, is every run on its newest version, and if not, why not.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import * as api from "./api.js";
import { confirm } from "./dialogs.js";
import { clock, count, plural, words } from "./format.js";
import { act, wantToken } from "./live.js";
import { mark } from "./marks.js";
import { closeRun, moveHere, reopenRun } from "./move.js";
import { rollBack } from "./rollback.js";
import { change } from "./store.js";

/** The line at the top. */
export function header({ link, heardAt, overview }) {
  return html`<h1>refitd</h1>
    <p class="link ${link.state}">${mark(link.state)}<span>${told(link, heardAt)}</span></p>
    ${tokenButton(overview)}
    <a href="/docs">API</a>`;
}

function told(link, heardAt) {
  const since = heardAt === null ? "" : `, last heard at ${clock(heardAt)}`;
  switch (link.state) {
    case "live":
      return "live";
    case "lost":
      return `not live: ${link.reason}${since}; trying again`;
    case "refused":
      return "not allowed in";
    default:
      return "connecting";
  }
}

function tokenButton(overview) {
  const forget = () => {
    api.dropToken();
    location.reload();
  };
  if (api.hasToken()) return html`<button type="button" class="quiet" @click=${forget}>Forget token</button>`;
  const text = "This service wants no token: everything is open to all who reach it.";
  const ask = () => overview !== null && !overview.wants_token
    ? change((state) => (state.notice = { bad: false, text }))
    : wantToken(new api.Problem(401, "Give it now, or when something asks for it."));
  return html`<button type="button" class="quiet" @click=${ask}>Token …</button>`;
}

/** What came of the last action. */
export function notice({ notice: said }) {
  if (said === null) return nothing;
  const dismiss = () => change((state) => (state.notice = null));
  return html`<p class="notice ${said.bad ? "bad" : "good"}" role=${said.bad ? "alert" : "status"}>
    ${mark(said.bad ? "TROUBLED" : "CURRENT")}<span>${said.text}</span>
    <button type="button" class="quiet" @click=${dismiss}>Dismiss</button>
  </p>`;
}

/** Each run, and what is wrong with the service itself. */
export function glance({ overview }) {
  const faults = Object.values(overview.faults).filter((fault) => fault !== null);
  return html`<section class="glance" aria-label="At a glance">
    ${faults.map((fault) => html`<p class="fault">${mark("TROUBLED")}<span>${fault}</span></p>`)}
    ${overview.runs.filter(isOpen).map((seen) => run(seen, overview))}
    ${closed(overview.runs.filter((seen) => !isOpen(seen)))}
    ${overview.runs.length === 0 ? empty(overview) : nothing}
  </section>`;
}

const isOpen = ({ standing }) => standing !== "CLOSED";

// Runs that have ended take one line, until the user unfolds them.
const closed = (runs) => runs.length === 0
  ? nothing
  : html`<details class="closed">
      <summary>${mark("CLOSED")}${plural(runs.length, "closed run")}</summary>
      <ul>
        ${runs.map(
          (seen) => html`<li><b>${seen.run}</b> ${seen.headline}
            <button type="button" class="quiet" @click=${() => reopenRun(seen)}>Reopen</button></li>`,
        )}
      </ul>
    </details>`;

const empty = (overview) => html`<article class="run">
  <h2>${mark("MOVING")}Nothing has been published yet.</h2>
  <p>${waiting(overview.engines)}. A trainer publishes
    with <code>WeightPublisher</code>, or <code>refitd publish DIR</code>.</p>
</article>`;

// Who could take a version, and who could not, by state.
function waiting(engines) {
  const ready = engines.filter(({ state }) => state === "IN_SYNC").length;
  const others = Map.groupBy(engines.filter(({ state }) => state !== "IN_SYNC"), ({ glance }) => glance);
  const told = [...others].map(([glance, { length }]) => `, ${count(length)} ${length === 1 ? "is" : "are"} ${glance}`);
  return `${plural(ready, "engine")} wait${ready === 1 ? "s" : ""}${told.join("")}`;
}

function run(seen, overview) {
  return html`<article class="run ${seen.standing}">
    <h2>${mark(seen.standing)}<span>${words(seen.standing)}: ${seen.headline}</span></h2>
    <p class="facts">
      <b>${seen.run}</b>
      ${seen.update === null ? nothing : html`<span>update ${seen.update}</span>`}
      ${seen.paused_since === null ? nothing : html`<span>${mark("PAUSED")}paused since ${clock(seen.paused_since)}</span>`}
    </p>
    ${seen.reasons.length === 0 ? nothing : html`<ul>${seen.reasons.map((reason) => html`<li>${reason}</li>`)}</ul>`}
    <div class="actions">
      ${seen.standing === "UNFOLLOWED" && overview.engines.length > 0
        ? html`<button type="button" class="primary" @click=${() => moveHere(seen, overview)}>Move engines here …</button>`
        : nothing}
      ${seen.paused_since === null
        ? html`<button type="button" ?disabled=${seen.update === null} @click=${() => pause(seen)}>Pause updates …</button>`
        : html`<button type="button" class="primary" @click=${() => resume(seen)}>Resume updates …</button>`}
      <button type="button" ?disabled=${seen.target === null} @click=${() => rollBack(seen.run)}>Roll back …</button>
      <button type="button" @click=${() => closeRun(seen)}>Close …</button>
    </div>
  </article>`;
}

async function pause({ run }) {
  const detail = html`<p>No engine of <b>${run}</b> goes to a newer version until you resume. Loads that are under way
    come to their end. An engine that restarts or breaks is brought to the last good version.</p>`;
  if (await confirm({ title: "Pause updates?", detail, verb: "Pause" })) {
    await act(`Updates of ${run} are paused.`, () => api.pause(run));
  }
}

async function resume({ run, engines: { UNREACHABLE: away } }) {
  const detail = html`<p>Engines of <b>${run}</b> go to its newest good version.
    ${away ? `${plural(away, "engine")} cannot be reached now, and will follow when back.` : nothing}</p>`;
  if (await confirm({ title: "Resume updates?", detail, verb: "Resume" })) {
    await act(`Updates of ${run} go on.`, () => api.resume(run));
  }
}
