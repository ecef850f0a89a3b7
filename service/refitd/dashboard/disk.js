// What lies on disk as one bar, by why it is kept or goes; the places themselves are folded.

import { html, nothing, svg } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import * as api from "./api.js";
import { confirm } from "./dialogs.js";
import { plural, size } from "./format.js";
import { act } from "./live.js";
import { mark } from "./marks.js";

const COLOURS = ["load", "verify", "prepare", "copy", "validate", "publish"];
const LISTED = 50;

/** Figures and names differ from place to place: without them a reason is the same for many. */
const alike = (reason) => reason.replace(/[^\s,;:()]*\d[^\s,;:()]*/g, "…");

/** Places by verdict and first reason, what goes first, then the largest: [{reason, keep, bytes, items}]. */
export function byReason(items) {
  const groups = new Map();
  for (const item of items) {
    const key = `${item.keep} ${alike(item.reasons[0] ?? "")}`;
    const group = groups.get(key) ?? { key, keep: item.keep, reason: item.reasons[0] ?? "for no reason", bytes: 0, items: [] };
    if (group.items.length > 0 && group.reason !== item.reasons[0]) group.reason = alike(item.reasons[0]);
    group.bytes += item.bytes ?? 0;
    group.items.push(item);
    groups.set(key, group);
  }
  return [...groups.values()].sort((one, other) => Number(one.keep) - Number(other.keep) || other.bytes - one.bytes);
}

/** The section. */
export function disk({ plan }) {
  const items = plan.items ?? [];
  const going = items.filter((item) => !item.keep);
  const bytes = items.reduce((sum, item) => sum + (item.bytes ?? 0), 0);
  const groups = byReason(items).map((group, index, all) => ({ ...group, fill: fillOf(group, index, all) }));
  return html`<section aria-labelledby="disk-title">
    <div class="bar-of-section">
      <h2 id="disk-title">Disk</h2>
      <span class="told">${plan.items === null ? "" : summary(plan, items, bytes)}</span>
      <span class="space"></span>
      <button type="button" ?disabled=${going.length === 0} @click=${() => reclaim(going, plan.freed)}>Reclaim …</button>
    </div>
    ${plan.problem === null ? nothing : html`<p class="fault">${mark("TROUBLED")}<span>${plan.problem}</span></p>`}
    ${items.length === 0 ? nothing : html`${wholeBar(groups, bytes, plan.budget)} ${reasons(groups)}`}
  </section>`;
}

const fillOf = ({ keep }, index, all) => {
  if (!keep) return "pause";
  return COLOURS[Math.min(index - all.filter((group) => !group.keep).length, COLOURS.length - 1)];
};

// What is there, what would go, how full the budget is, and what refitd may not delete.
function summary(plan, items, bytes) {
  const budget = plan.budget === null ? "" : `; ${size(plan.kept)} of a budget of ${size(plan.budget)} kept`;
  const foreign = plan.foreign === 0 ? "" : `; ${size(plan.foreign)} not refitd's to delete`;
  return `${size(bytes)} in ${plural(items.length, "place")}; ${size(plan.freed)} would be freed${budget}${foreign}`;
}

// As wide as the disk budget where there is one, else as what is there.
function wholeBar(groups, bytes, budget) {
  const whole = Math.max(bytes, budget ?? 0, 1);
  let x = 0;
  const parts = groups.map((group) => {
    const part = { ...group, x: (x / whole) * 100, width: (group.bytes / whole) * 100 };
    x += group.bytes;
    return part;
  });
  const inWords = (group) => `${size(group.bytes)} ${verb(group)}: ${group.reason}`;
  return html`<svg class="bar disk" role="img" aria-label="Disk: ${groups.map(inWords).join("; ")}">
    <rect class="room" width="100%" height="16" />
    ${parts.map(
      (part) => svg`<rect class="stage ${part.fill}" x="${part.x}%" width="${part.width}%" height="16">
        <title>${inWords(part)}</title></rect>`,
    )}
    ${budget === null ? nothing : svg`<line class="budget" x1="${(budget / whole) * 100}%" x2="${(budget / whole) * 100}%" y2="16" />`}
  </svg>`;
}

const largestFirst = (one, other) => (other.bytes ?? 0) - (one.bytes ?? 0);

// A place, with its reasons where the group's is not all.
const place = ({ path, bytes, reasons }) => html`<li title=${path}>${short(path)} (${size(bytes)})${reasons.length > 1
  ? `: ${reasons.slice(0, 3).join("; ")}`
  : ""}</li>`;

const verb = ({ keep }) => (keep ? "keep" : "delete");

const reasons = (groups) => html`<ul class="reasons">
  ${repeat(
    groups,
    ({ key }) => key,
    (group) => html`<li><details>
      <summary><svg class="key" viewBox="0 0 9 12" aria-hidden="true"><rect class="stage ${group.fill}" width="9" height="12" /></svg>
        <b>${verb(group)}</b> <span class="reason">${group.reason}</span>
        <span class="figures">${plural(group.items.length, "place")}, ${size(group.bytes)}</span></summary>
      <ul class="sentences">${[...group.items].sort(largestFirst).slice(0, LISTED).map(place)}</ul>
      ${group.items.length > LISTED
        ? html`<p class="hint">and ${group.items.length - LISTED} more: <code>refitd reclaim --dry-run</code> lists all</p>`
        : nothing}
    </details></li>`,
  )}
</ul>`;

// Without the tails of long hexadecimal names, which only machines read: the whole is in the title.
const short = (path) => path.replace(/\b([0-9a-f]{8})[0-9a-f]{8,}\b/g, "$1…");

async function reclaim(going, freed) {
  const detail = html`<p>${plural(going.length, "place")} would be deleted, ${size(freed)} in all. Each is looked at again
    right before.</p>
    <ul class="plan">${going.slice(0, LISTED).map((item) => html`<li>${short(item.path)} (${size(item.bytes)}): ${item.reasons.join("; ")}</li>`)}</ul>`;
  if (await confirm({ title: "Reclaim?", detail, verb: "Delete", danger: true })) {
    await act("Reclaimed.", () => api.reclaim());
  }
}
