// Keeps the state true. Events only say "look again": what is shown is always asked for anew, at most once a second.

import * as api from "./api.js";
import { askForToken } from "./dialogs.js";
import { laneEngines } from "./lanes.js";
import { LOG_PAGE, PAGE, addToLog, change, state } from "./store.js";
import { follow } from "./stream.js";
import { merged } from "./window.js";

const PACE = 1000;
const PLAN_PACE = 5000;
const PAST_PACE = 2000;
const ALL_UPDATES = 1000;
const NEW_UPDATES = 50; // that are asked for again: what is older does not change
const LANE_LOADS = 200;
const OLDER_PAGE = 50; // decisions
const CHARTS_WITHIN = 2000;
const ANYWAY = 15_000; // also without an event: a reason or a time-out may have changed
const AGAIN = 3000; // after a question that was not answered: no event may come that would have it asked

/**
 * A question to the service that is asked at most once in `pace` milliseconds, however often it is wanted. `ask`
 * resolves to false where it was not answered: it is asked again then, unless the link is lost, whose return asks all.
 */
class Question {
  constructor(ask, pace) {
    this.ask = ask;
    this.pace = pace;
    this.due = null;
    this.running = false;
    this.after = null; // what to do when what is asked now is answered, as that may not be what is wanted any more
    this.askedAt = 0;
  }

  /** Ask soon. */
  want() {
    if (this.due !== null) return;
    const wait = Math.max(0, this.askedAt + this.pace - Date.now());
    this.due = setTimeout(() => {
      this.due = null;
      if (this.running) this.after ??= () => this.want();
      else this.now();
    }, wait);
  }

  /** Ask now; resolves when the answer is in the state. */
  async now() {
    clearTimeout(this.due);
    this.due = null;
    if (this.running) {
      this.after = () => this.now();
      return;
    }
    this.running = true;
    this.askedAt = Date.now();
    let isAnswered = true;
    try {
      isAnswered = await this.ask();
    } finally {
      this.running = false;
    }
    const { after } = this;
    this.after = null;
    if (after !== null) return after();
    if (!isAnswered && state.link.state === "live") setTimeout(() => this.want(), AGAIN);
  }
}

const overview = new Question(() => taken(api.overview(), (found) => change((state) => (state.overview = found))), PACE);
const versions = new Question(askVersions, PACE);
const log = new Question(askLog, PACE);
const plan = new Question(loadPlan, PLAN_PACE);
const unfolded = new Question(loadUnfolded, PACE);
const past = new Question(loadPast, PAST_PACE);
const stale = new Set(); // engines whose lanes are not as they were

// Resolves to false where the service did not answer.
async function taken(answer, take) {
  try {
    take(await answer);
    change((state) => (state.heardAt = Date.now()));
    return true;
  } catch (problem) {
    if (!(problem instanceof api.Problem)) throw problem;
    if (problem.wantsToken) wantToken(problem);
    return !problem.mayPass;
  }
}

function askVersions() {
  const { run, versions } = state;
  const cursor = versions.before.at(-1);
  return taken(api.versions({ run, cursor, limit: PAGE }), (page) => {
    if (state.run !== run || state.versions.before.at(-1) !== cursor) return; // another page is wanted by now
    change((state) => Object.assign(state.versions, { items: page.items, next: page.next_cursor }));
  });
}

/** Fetch the page of versions that is shown. */
export const loadVersions = () => versions.now();

async function loadPlan() {
  try {
    const found = await api.plan();
    const { items, freed_bytes: freed, kept_bytes: kept, foreign_bytes: foreign, disk_budget: budget } = found;
    change(({ plan }) => Object.assign(plan, { items, freed, kept, foreign, budget, problem: null }));
    return true;
  } catch (problem) {
    if (problem.wantsToken) wantToken(problem);
    else change(({ plan }) => (plan.problem = problem.message));
    return !problem.mayPass;
  }
}

function askLog() {
  const { subject } = state.log;
  return taken(api.log({ subject, limit: LOG_PAGE }), (page) => {
    if (state.log.subject !== subject) return; // another log is wanted by now
    change(({ log }) => Object.assign(log, { items: page.items, more: page.next_cursor }));
  });
}

/** Fetch the newest page of the log. */
export const loadLog = () => log.now();

/** Fetch the page of the log behind what is shown. */
export function loadOlderLog() {
  const { subject, more } = state.log;
  return taken(api.log({ subject, before: more, limit: OLDER_PAGE }), (page) => {
    if (state.log.subject !== subject) return; // another log is wanted by now
    change(({ log }) => Object.assign(log, { items: [...log.items, ...page.items], more: page.next_cursor }));
  });
}

// What stands below the charts is drawn once they are, or where they do not come.
function drawBelow() {
  if (!state.history.isAsked) change(({ history }) => (history.isAsked = true));
}

let isWhole = false; // whether the service has told all updates, with all their loads

async function loadPast() {
  const limit = isWhole ? NEW_UPDATES : ALL_UPDATES;
  let isAnswered = await taken(api.history({ limit }), ({ updates, complete }) => {
    isWhole = complete;
    change(({ history }) => (history.updates = merged(history.updates, updates)));
  });
  drawBelow();
  for (const { id } of laneEngines(state).here) {
    if (stale.has(id) || state.history.lanes[id] === undefined) isAnswered = (await loadLane(id)) && isAnswered;
  }
  if (!isWhole && isAnswered) past.want();
  return isAnswered;
}

async function loadLane(engine) {
  stale.delete(engine);
  const zoom = state.history.zoom;
  const limit = zoom === null ? LANE_LOADS : ALL_UPDATES;
  const isAnswered = await taken(api.engineHistory(engine, limit), (found) =>
    change(({ history }) => (history.lanes[engine] = found)),
  );
  if (!isAnswered) stale.add(engine);
  return isAnswered;
}

// What was zoomed to may begin before the loads that are known.
function lookBack() {
  for (const [engine, { more, loads }] of Object.entries(state.history.lanes)) {
    if (more && loads.length < ALL_UPDATES) stale.add(engine);
  }
  past.want();
}

async function loadUnfolded() {
  const { open } = state;
  if (open === null) return true;
  const isExplained = await taken(api.explain(open.id), (found) => change(() => (open.sentences = found.sentences)));
  if (open.kind !== "version") return isExplained;
  return (await taken(api.attempts(open.id), (page) => change(() => (open.attempts = page.items)))) && isExplained;
}

/** Unfold what there is to say about a version or an engine; fold it where it is unfolded. */
export function unfold(kind, id) {
  change((state) => {
    state.open = state.open?.id === id ? null : { kind, id, sentences: null, attempts: null };
  });
  unfolded.now();
}

/** Ask for everything again. */
export const lookAtAll = () => Promise.all([overview.now(), versions.now(), plan.now(), unfolded.now(), log.now(), past.now()]);

function hear(events) {
  change((state) => {
    state.heardAt = Date.now();
    addToLog(state.log, events);
  });
  overview.want();
  versions.want();
  for (const { kind, subject } of events) if (kind === "engine") stale.add(subject);
  past.want();
  if (events.some(({ kind }) => kind === "version" || kind === "update")) plan.want();
  if (state.open !== null) unfolded.want();
}

function tell(link) {
  const wasLost = state.link.state !== "live";
  change((state) => (state.link = link));
  if (link.state === "refused") wantToken(link.problem);
  if (link.state === "live" && wasLost) lookAtAll();
}

// When the page is looked at again, or the network is back, it does not wait for its turn.
function hurry() {
  return new Promise((done) => {
    const options = { once: true };
    addEventListener("online", done, options);
    addEventListener("focus", done, options);
    document.addEventListener("visibilitychange", done, options);
  });
}

let wanted = null;
let following = false;

/** Ask for a token, once however many requests were refused. */
export function wantToken(problem) {
  wanted ??= askForToken(problem).then((given) => {
    wanted = null;
    if (given) start();
    else if (state.overview === null) change((state) => (state.link = { state: "refused", problem }));
    return given;
  });
  return wanted;
}

/** Do something that changes something, and say what came of it. A token is asked for where one is wanted. */
export async function act(what, how) {
  try {
    await how();
    change((state) => (state.notice = { bad: false, text: what }));
    lookAtAll();
  } catch (problem) {
    if (!(problem instanceof api.Problem)) throw problem;
    if (problem.wantsToken && (await wantToken(problem))) return act(what, how);
    change((state) => (state.notice = { bad: true, text: problem.message }));
  }
}

/** What the service says to a question of the moment; null where it cannot say, which is told like a failed action. */
export async function asked(how) {
  try {
    return await how();
  } catch (problem) {
    if (!(problem instanceof api.Problem)) throw problem;
    if (problem.wantsToken && (await wantToken(problem))) return asked(how);
    change((state) => (state.notice = { bad: true, text: problem.message }));
    return null;
  }
}

/** Look, then follow. */
export async function start() {
  await overview.now();
  if (following) lookAtAll(); // what was refused for want of a token is asked again
  if (following || state.overview === null) {
    if (!following && wanted === null) setTimeout(start, 2000);
    return;
  }
  following = true;
  setTimeout(drawBelow, CHARTS_WITHIN);
  await follow({ from: state.overview.event, hear, tell, hurry });
  following = false;
}

addEventListener("lanes-wanted", () => {
  if (state.link.state === "live") past.want();
});
addEventListener("zoomed", lookBack);

setInterval(() => {
  if (!document.hidden && state.link.state === "live") overview.want();
}, ANYWAY);
