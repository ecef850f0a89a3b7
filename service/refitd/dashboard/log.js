// The log of decisions, newest first, as it is written.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { clock } from "./format.js";
import { loadLog } from "./live.js";
import { change } from "./store.js";

/** Show the log of one version or engine, or of everything (null). */
export function showLog(subject) {
  change(({ log }) => Object.assign(log, { subject, items: null, more: null }));
  loadLog();
}

/** The section. */
export function log({ log: { items, more, subject } }) {
  return html`<section id="log" aria-labelledby="log-title" tabindex="-1">
    <div class="bar-of-section">
      <h2 id="log-title">Decisions</h2>
      ${subject === null
        ? nothing
        : html`<span class="told">about ${subject}</span>
            <button type="button" class="quiet" @click=${() => showLog(null)}>Show all</button>`}
    </div>
    ${items === null || items.length === 0 ? html`<p class="empty">${items === null ? "Asking …" : "Nothing yet."}</p>` : list(items)}
    ${more === null ? nothing : html`<button type="button" @click=${() => loadLog({ older: true })}>Older</button>`}
  </section>`;
}

const list = (items) => html`<table class="log">
  <caption class="unseen">Decisions, newest first</caption>
  <thead>
    <tr><th scope="col" class="when">When</th><th scope="col" class="about">About</th><th scope="col">What</th></tr>
  </thead>
  <tbody>
    ${repeat(
      items,
      (event) => event.seq,
      (event) => html`<tr>
        <td><time datetime=${event.at}>${clock(event.at)}</time></td>
        <td><button type="button" class="quiet subject" title=${event.subject} @click=${() => showLog(event.subject)}>${event.subject}</button></td>
        <td>${event.text}</td>
      </tr>`,
    )}
  </tbody>
</table>`;
