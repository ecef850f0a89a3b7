// What lies on disk, by version, and why each is kept or goes.

import { html, nothing, svg } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import * as api from "./api.js";
import { confirm } from "./dialogs.js";
import { folded } from "./folded.js";
import { count, plural, size } from "./format.js";
import { act } from "./live.js";
import { mark } from "./marks.js";
import { pager } from "./pager.js";
import { DISK_PAGE, change } from "./store.js";

/** Largest first; what goes before what stays. */
export const bySize = (one, other) =>
  Number(one.keep) - Number(other.keep) || (other.bytes ?? 0) - (one.bytes ?? 0) || (one.path < other.path ? 1 : -1);

/** The section. */
export function disk({ plan }) {
  const items = [...(plan.items ?? [])].sort(bySize);
  const going = items.filter((item) => !item.keep);
  const bytes = items.reduce((sum, item) => sum + (item.bytes ?? 0), 0);
  const pages = Math.max(1, Math.ceil(items.length / DISK_PAGE));
  const page = Math.min(plan.page, pages - 1);
  const shown = items.slice(page * DISK_PAGE, (page + 1) * DISK_PAGE);
  return html`<section aria-labelledby="disk-title">
    <div class="bar-of-section">
      <h2 id="disk-title">Disk</h2>
      <span class="told">${plan.items === null ? "" : summary(plan, items, bytes)}</span>
      <span class="space"></span>
      <button type="button" ?disabled=${going.length === 0} @click=${() => reclaim(going, plan.freed)}>Reclaim …</button>
    </div>
    ${plan.problem === null ? nothing : html`<p class="fault">${mark("TROUBLED")}<span>${plan.problem}</span></p>`}
    ${items.length === 0 ? nothing : table(shown, Math.max(...items.map((item) => item.bytes ?? 0), 1))}
    ${pager({
      what: "places on disk",
      told: `${page * DISK_PAGE + 1} – ${page * DISK_PAGE + shown.length} of ${count(items.length)}`,
      canBack: page > 0,
      canOn: page < pages - 1,
      turn: (by) => change((state) => (state.plan.page = page + by)),
    })}
  </section>`;
}

// What is there, what would go, how full the budget is, and what refitd may not delete.
function summary(plan, items, bytes) {
  const budget = plan.budget === null ? "" : `; ${size(plan.kept)} of a budget of ${size(plan.budget)} kept`;
  const foreign = plan.foreign === 0 ? "" : `; ${size(plan.foreign)} not refitd's to delete`;
  return `${size(bytes)} in ${plural(items.length, "place")}; ${size(plan.freed)} would be freed${budget}${foreign}`;
}

function table(items, largest) {
  return html`<table class="disk">
    <caption class="unseen">Places on disk, what would be deleted first, then the largest</caption>
    <thead>
      <tr>
        <th scope="col">Path</th>
        <th scope="col" class="number">Size</th>
        <th scope="col" class="wide share"><span class="unseen">Share</span></th>
        <th scope="col">Verdict, and why</th>
      </tr>
    </thead>
    <tbody>
      ${repeat(
        items,
        (item) => item.path,
        (item) => html`<tr>
          <th scope="row" title=${item.path}>${short(item.path)}</th>
          <td class="number">${size(item.bytes)}</td>
          <td class="wide share">${share(item, largest)}</td>
          <td>
            <span class="state ${item.keep ? "good" : "over"}">${mark(item.keep ? "SEALED" : "DELETED")}<span>${item.keep ? "keep" : "delete"}</span></span>
            <div class="why">${folded(item.reasons, 2)}</div>
          </td>
        </tr>`,
      )}
    </tbody>
  </table>`;
}

// Without the tails of long hexadecimal names, which only machines read: the whole is in the title.
const short = (path) => path.replace(/\b([0-9a-f]{8})[0-9a-f]{8,}\b/g, "$1…");

const share = (item, largest) => html`<svg class="bar" aria-hidden="true">
  ${svg`<rect class=${item.keep ? "kept" : "going"} width="${((item.bytes ?? 0) / largest) * 100}%" y="4" height="8" />`}
</svg>`;

async function reclaim(going, freed) {
  const detail = html`<p>${plural(going.length, "place")} would be deleted, ${size(freed)} in all. Each is looked at again
    right before.</p>
    <ul class="plan">${going.slice(0, 50).map((item) => html`<li>${short(item.path)} (${size(item.bytes)}): ${item.reasons.join("; ")}</li>`)}</ul>`;
  if (await confirm({ title: "Reclaim?", detail, verb: "Delete", danger: true })) {
    await act("Reclaimed.", () => api.reclaim());
  }
}
