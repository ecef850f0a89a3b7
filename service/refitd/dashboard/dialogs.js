// Questions: is this meant, and what is the token. Native dialogs: they keep the focus, close on Escape, give it back.

import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { hasToken, keepToken } from "./api.js";

const place = () => document.getElementById("dialogs");

/**
 * Ask whether something is meant. `detail` is a template or text, `verb` what the button does. Resolves to true or
 * false. The focus is on "Cancel": Enter alone changes nothing.
 */
export function confirm({ title, detail, verb, danger = false }) {
  return show(
    title,
    (close) => html`<div class="detail">${detail}</div>
      <menu>
        <button type="button" autofocus @click=${() => close(false)}>Cancel</button>
        <button type="button" class=${danger ? "danger" : "primary"} @click=${() => close(true)}>${verb}</button>
      </menu>`,
    false,
  );
}

/**
 * Ask for what is in a form. `fields` is a template, `verb` what the button does. Resolves to its FormData, or to null
 * where nothing is meant.
 */
export function ask({ title, fields, verb }) {
  const take = (close) => (event) => {
    event.preventDefault();
    close(new FormData(event.target));
  };
  return show(
    title,
    (close) => html`<form @submit=${take(close)}>
      ${fields}
      <menu>
        <button type="button" @click=${() => close(null)}>Cancel</button>
        <button type="submit" class="primary">${verb}</button>
      </menu>
    </form>`,
    null,
  );
}

/** Ask for the token, because of `problem`. Resolves to whether one was given. */
export function askForToken(problem) {
  const take = (close) => (event) => {
    event.preventDefault();
    const token = new FormData(event.target).get("token").trim();
    if (token !== "") keepToken(token);
    close(token !== "");
  };
  return show(
    "The service wants a token",
    (close) => html`<form @submit=${take(close)}>
      <p class="detail">${wanted(problem)}</p>
      <label for="token">Token</label>
      <input id="token" name="token" type="password" autocomplete="off" spellcheck="false" required autofocus />
      <p class="hint">It stays in this tab, and is forgotten when the tab is closed.</p>
      <menu>
        <button type="button" @click=${() => close(false)}>Cancel</button>
        <button type="submit" class="primary">Use it</button>
      </menu>
    </form>`,
    false,
  );
}

// What the dialog's field asks for: the API's own message speaks of headers.
function wanted(problem) {
  if (problem.status === 403) return "The token that you gave may only look, and this changes something: give the one that may.";
  if (hasToken()) return "The token that you gave is not known to the service: give another one.";
  return problem.slug === undefined ? problem.message : "It is the one that the service was started with (--token-file, REFITD_TOKEN).";
}

let asking = Promise.resolve();

/**
 * Show a dialog; one at a time, the next one waits. `content` makes what is in it, and gets what closes it with an
 * answer. Resolves to that answer, or to `otherwise` where the dialog is closed without one.
 */
export function show(title, content, otherwise) {
  const answer = asking.then(() => opened(title, content, otherwise));
  asking = answer;
  return answer;
}

function opened(title, content, otherwise) {
  const before = document.activeElement;
  return new Promise((resolve) => {
    let answer = otherwise;
    const close = (given) => {
      answer = given;
      place().querySelector("dialog").close();
    };
    const closed = () => {
      render(nothing, place());
      if (before?.isConnected) before.focus();
      resolve(answer);
    };
    render(
      html`<dialog aria-labelledby="dialog-title" @close=${closed}>
        <h2 id="dialog-title">${title}</h2>
        ${content(close)}
      </dialog>`,
      place(),
    );
    place().querySelector("dialog").showModal();
  });
}
