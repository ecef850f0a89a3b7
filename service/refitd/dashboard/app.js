// The page: the state in, the page out. Everything else is in the file of its name.

import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { disk } from "./disk.js";
import { engines } from "./engines.js";
import { glance, header, notice } from "./glance.js";
import { start } from "./live.js";
import { history } from "./history.js";
import { log, showLog } from "./log.js";
import { drawWith } from "./store.js";
import { updates } from "./updates.js";

const main = document.getElementById("main");
const top = document.getElementById("header");
const announcer = document.getElementById("announcer");
let isFirst = true;

function page(state) {
  if (state.overview === null) {
    const text = { refused: "The service wants a token.", lost: "The service does not answer." }[state.link.state];
    return html`<p class="waiting">${text ?? "Asking the service …"}</p>`;
  }
  // What stands below the charts comes after them: it would be moved from under the mouse.
  const below = () => html`${updates(state)} <div class="two">${disk(state)} ${log(state)}</div>`;
  return html`${notice(state)} ${glance(state)} ${engines(state)} ${history(state)}
    ${state.history.isAsked ? below() : nothing}`;
}

// A screen reader hears when a run stands otherwise than before, and nothing of the rest.
function announce({ overview, link }) {
  const open = overview?.runs.filter((run) => run.standing !== "CLOSED") ?? [];
  const runs = open.map((run) => `${run.run}: ${run.standing.toLowerCase()}`).join("; ");
  const text = link.state === "lost" ? "The connection to the service is lost." : runs;
  if (announcer.dataset.text === text) return;
  announcer.dataset.text = text;
  if (open.length > 0) {
    document.title = `${open.map((run) => run.standing.toLowerCase()).join(", ")} · refitd`;
  }
  announcer.textContent = link.state === "lost" ? text : open.map((run) => run.headline).join(" ");
}

drawWith((state) => {
  if (isFirst) {
    main.replaceChildren();
    top.replaceChildren();
    isFirst = false;
  }
  render(header(state), top);
  render(page(state), main);
  document.documentElement.classList.toggle("stale", state.link.state === "lost");
  announce(state);
});

addEventListener("show-log", ({ detail }) => showLog(detail));
start();
