// "26 – 50 of 200", with a button for each direction.

import { html, nothing } from "./vendor/lit-html/lit-html.js";

/** `turn` is called with -1 or 1. Nothing is shown where all fits on one page. */
export function pager({ what, told, canBack, canOn, turn, back = "Previous", on = "Next" }) {
  if (!canBack && !canOn) return nothing;
  return html`<nav class="pager" aria-label="Pages of ${what}">
    <button type="button" ?disabled=${!canBack} @click=${() => turn(-1)}>${back}</button>
    <span>${told}</span>
    <button type="button" ?disabled=${!canOn} @click=${() => turn(1)}>${on}</button>
  </nav>`;
}
