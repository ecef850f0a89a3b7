// Engines go over to another run, and runs end: what each loses by that is said before it is done.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import * as api from "./api.js";
import { ask, confirm } from "./dialogs.js";
import { plural } from "./format.js";
import { act } from "./live.js";

const isOpen = (runs, name) => runs.some((seen) => seen.run === name && seen.standing !== "CLOSED");

const whose = (engine, runs) => {
  if (engine.run === null) return "follows no run";
  return isOpen(runs, engine.run) ? `follows ${engine.run}, which would lose it` : `follows ${engine.run}, which is closed`;
};

/** Ask which run an engine is to follow, and move it there. */
export async function moveEngine(engine, runs) {
  const others = runs.filter((seen) => seen.run !== engine.run);
  const fields = html`<p class="detail"><b>${engine.id}</b> ${whose(engine, runs)}. It goes on serving what it serves until
      it has loaded the newest good version of its new run.</p>
    <label for="run">Run</label>
    <input id="run" name="run" list="runs" required autofocus autocomplete="off" spellcheck="false" />
    <datalist id="runs">${others.map((seen) => html`<option value=${seen.run}></option>`)}</datalist>
    <p class="hint">It need not have published yet.</p>`;
  const given = await ask({ title: "Move to another run?", fields, verb: "Move" });
  const run = given?.get("run").trim();
  if (run) await act(`${engine.id} follows ${run} from now on.`, () => api.move([engine.id], run));
}

/** Ask which engines are to follow a run that has none, and move them there. Those that no run would lose are chosen. */
export async function moveHere({ run }, { engines, runs }) {
  const line = (engine) => html`<li>
    <label><input type="checkbox" name="engine" value=${engine.id} ?checked=${!isOpen(runs, engine.run)} />
      <b>${engine.id}</b> ${whose(engine, runs)}</label>
  </li>`;
  const fields = html`<p class="detail">They go on serving what they serve until they have loaded the newest good version
      of <b>${run}</b>.</p>
    <ul class="choices">${engines.map(line)}</ul>`;
  const given = await ask({ title: `Engines for ${run}`, fields, verb: "Move" });
  const chosen = given?.getAll("engine") ?? [];
  if (chosen.length === 0) return;
  await act(`${plural(chosen.length, "engine")} will serve ${run}.`, () => api.move(chosen, run));
}

/** Ask whether a run has ended, and close it. */
export async function closeRun({ run, engines }) {
  const count = Object.values(engines).reduce((sum, each) => sum + each, 0);
  const detail = html`<p>Of <b>${run}</b> the newest good version is kept, with what engines need and what is pinned,
      and one without a verdict if it is newer. Collection deletes the others. The next version that is published opens it again.</p>
    ${count > 0 ? html`<p>${plural(count, "engine")} may be moved to another run; until then nothing changes there.</p>` : nothing}`;
  if (await confirm({ title: "Close the run?", detail, verb: "Close", danger: true })) {
    await act(`${run} is closed.`, () => api.closeRun(run));
  }
}

/** Take back that a run has ended. */
export const reopenRun = ({ run }) => act(`${run} is open again.`, () => api.reopenRun(run));
