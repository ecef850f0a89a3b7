// The state of the page, in one place. Code that changes it calls `change`, and the page is drawn again before the next frame.

const isNarrow = matchMedia("(max-width: 700px)").matches; // a phone: lists begin shorter

export const PAGE = isNarrow ? 5 : 25; // versions
export const ENGINES_PAGE = isNarrow ? 10 : 25;
export const LOG_PAGE = 100;

export const state = {
  link: { state: "connecting" }, // see stream.js
  heardAt: null, // when the service last said anything
  overview: null,
  run: null, // the run whose versions are shown; null shows all
  engines: { state: null, text: "", only: null, page: 0 }, // `only` is the id of the one that was chosen in the grid
  versions: { items: null, next: null, before: [] }, // `before` are the cursors of the pages that were left
  plan: { items: null, freed: 0, kept: 0, foreign: 0, budget: null, problem: null },
  // `isAsked` is whether the service was asked, and has answered or not; `zoom`: see window.js
  history: { updates: null, isAsked: false, zoom: null, lanes: {}, page: 0, width: null },
  log: { items: null, more: null, subject: null, open: {}, groups: isNarrow ? 5 : 10 },
  open: null, // what is unfolded: {id, sentences, attempts}
  notice: null, // {bad, text}: what came of the last action
};

let draw = () => {};
let due = false;

/** Draw the page with `renderer` whenever something changes. */
export function drawWith(renderer) {
  draw = renderer;
  change(() => {});
}

/** Change the state, then draw. However many changes there are, there is one drawing a frame. */
export function change(how) {
  how(state);
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    draw(state);
  });
}

/** Put events at the top of the log, the newest first, and let go of as many at its end: it stays as long as it is. */
export function addToLog(log, events) {
  if (log.items === null) return;
  const newest = log.items.length > 0 ? log.items[0].seq : 0;
  const mine = events.filter((event) => event.seq > newest && (!log.subject || event.subject === log.subject));
  const kept = Math.max(LOG_PAGE, log.items.length);
  const all = [...mine.reverse(), ...log.items];
  log.items = all.slice(0, kept);
  if (all.length > kept) log.more = String(log.items.at(-1).seq);
}
