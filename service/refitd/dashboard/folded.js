// A list of which the first few say enough.

import { html, nothing } from "./vendor/lit-html/lit-html.js";

/** The first `few` of `lines`, and the others behind "and 12 more". */
export function folded(lines, few) {
  const rest = lines.slice(few);
  const item = (line) => html`<li>${line}</li>`;
  return html`<ul class="sentences">${lines.slice(0, few).map(item)}</ul>
    ${rest.length === 0
      ? nothing
      : html`<details><summary>and ${rest.length} more</summary><ul class="sentences">${rest.map(item)}</ul></details>`}`;
}
