// Going back: where it leads and what it bars is said before it is done, by the service itself.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import * as api from "./api.js";
import { confirm } from "./dialogs.js";
import { act, asked } from "./live.js";

const NAMED = 3;

/** Ask, then roll a run back: to the version `to`, else to the last one that engines served before the current. */
export async function rollBack(run, to) {
  const plan = await asked(() => api.rollbackPlan(run, to));
  if (plan === null) return;
  if (await confirm({ title: `Roll back to ${plan.goal}?`, detail: detail(plan), verb: "Roll back", danger: true })) {
    await act(`${run} rolls back to ${plan.goal}.`, () => api.rollback(run, plan.goal));
  }
}

const detail = (plan) => html`<p>Engines of <b>${plan.run}</b> go from ${plan.leaves} back to <b>${plan.goal}</b>.</p>
  ${plan.barred.length === 0
    ? html`<p>Nothing newer is left to bar.</p>`
    : html`<p>Barred for good: ${listed(plan.barred)}. No engine goes there again, and collection deletes
          ${plan.barred.length === 1 ? "its" : "their"} files, but for what is pinned and the newest on disk.</p>
        <p>To go forward again, publish anew: the trainer's next step, or the same one by
          <code>refitd publish --new-generation</code> (in the SDK: by a publisher that is opened anew).</p>`}
  ${plan.unreachable.length === 0
    ? nothing
    : html`<p>${listed(plan.unreachable)} cannot be reached now, and will follow when back.</p>`}`;

function listed(ids) {
  const more = ids.length - NAMED;
  return ids.slice(0, NAMED).join(", ") + (more > 0 ? ` and ${more} more` : "");
}
