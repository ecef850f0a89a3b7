// Updates over time: what each cost, stage by stage, how long engines stood still, what it weighed, and what failed.

import { html, nothing, render, svg } from "./vendor/lit-html/lit-html.js";
import { Chart, bars, colour, gutters, isNarrow, marks, onColours } from "./charts.js";
import { clock, count, plural, share, size, span } from "./format.js";
import { lanes, laneMoments } from "./lanes.js";
import { change } from "./store.js";
import { STAGES, ordered, total } from "./timeline.js";
import { at, failed, moved, scaled, shown, whyFull } from "./window.js";

const KINDS = { full: "load", delta: "resume", handover: "verify", lora: "prepare" };
const LEAST = 1e-6; // the smallest share that has a place on a logarithmic scale
const STRETCH = 0.5; // what is left of the view by one step of zooming in

const node = document.createElement("div"); // holds the charts, which draw themselves
node.className = "charts";
const readout = document.createElement("p");
readout.className = "readout";

let updates = []; // those of the run that is shown, the oldest first
let view = null;
let pointed = null;

function zoomTo(zoom) {
  change(({ history }) => (history.zoom = zoom));
  if (zoom !== null) dispatchEvent(new CustomEvent("zoomed"));
}

const whole = () => shown("all", updates, laneMoments());

const point = (index) => {
  pointed = index;
  render(told(updates[index] ?? null), readout);
};

const common = { choose: (to) => zoomTo(to), reset: () => zoomTo(null), point };
const isFailed = (index) => failed(updates[index]);
const values = (pick) => updates.map((update) => pick(update) ?? null);

const CHARTS = [
  {
    title: "Stages",
    meaning: "how long each stage of an update took",
    data: () => [values(({ timings }) => total(timings))],
    newest: ({ timings }) => span(total(timings)),
    chart: new Chart({
      ...common,
      height: () => (isNarrow() ? 96 : 136),
      told: span,
      lines: [{ stroke: "load", hidden: true }],
      paint: (u) => {
        const fills = Object.fromEntries(Object.keys(STAGES).map((name) => [name, colour(name)]));
        const parts = ({ name, ms }) => ({ value: ms, fill: fills[name] ?? colour("other") });
        bars((index) => ordered(updates[index].timings).map(parts))(u);
        marks(isFailed, true)(u);
      },
    }),
  },
  {
    title: "Pause",
    meaning: "how long engines stood still: the median and the 95th percentile of an update's engines",
    data: () => [values(({ pause }) => pause?.p50), values(({ pause }) => pause?.p95)],
    newest: ({ pause }) => percentiles(pause),
    chart: percentileChart(),
  },
  {
    title: "Publish to served",
    meaning: "from the start of publishing until an engine serves: the median and the 95th percentile",
    data: () => [values(({ served }) => served?.p50), values(({ served }) => served?.p95)],
    newest: ({ served }) => percentiles(served),
    chart: percentileChart(),
  },
  {
    title: "Size",
    meaning: "bytes of the version; points: the share of elements that changed",
    data: () => [values(({ bytes }) => bytes), values(({ density }) => density && Math.max(density, LEAST))],
    newest: ({ bytes, density }) => `${size(bytes)}${density === null ? "" : `, ${share(density)} changed`}`,
    chart: new Chart({
      ...common,
      height: () => (isNarrow() ? 88 : 122),
      told: (bytes) => size(bytes).replace(".0 ", " "),
      right: share,
      labels: true,
      log: true,
      lines: [
        { stroke: "load", hidden: true },
        { stroke: "pause", points: true, scale: "right" },
      ],
      paint: (u) => {
        bars((index) => [{ value: updates[index].bytes ?? 0, fill: colour(KINDS[updates[index].kind]) }])(u);
        marks(isFailed, false)(u);
      },
    }),
  },
];

function percentileChart() {
  return new Chart({
    ...common,
    height: () => (isNarrow() ? 68 : 92),
    told: span,
    lines: [
      { stroke: "load", points: false },
      { stroke: "pause", dash: [5, 3] },
    ],
    paint: marks(isFailed, false),
  });
}

const percentiles = (spread) =>
  spread === null ? "–" : spread.count === 1 ? span(spread.p50) : `p50 ${span(spread.p50)}, p95 ${span(spread.p95)}`;

/** The section. Charts draw themselves after the page, when their places are known. */
export function history(state) {
  const { history: past, run } = state;
  if (past.updates === null) return section(html`<p class="empty">Asking …</p>`);
  updates = run === null ? past.updates : past.updates.filter((update) => update.run === run);
  view = shown(past.zoom, updates, laneMoments());
  if (view === null) return section(html`<p class="empty">No updates yet.</p>`);
  places();
  requestAnimationFrame(drawCharts);
  const inView = updates.filter((update) => at(update) >= view.from && at(update) <= view.to);
  return section(
    html`${readout} ${node} ${lanes(state, updates, view)} ${summary(inView)}`,
    html`${tools(past.zoom)}<span class="space"></span>${legend(inView)}`,
  );
}

const section = (content, beside = nothing) => html`<section class="history" aria-labelledby="history-title">
  <div class="bar-of-section"><h2 id="history-title">Over time</h2>${beside}</div>
  ${content}
</section>`;

function tools(zoom) {
  const step = (how) => () => zoomTo(how(view, whole()));
  const all = { zoom: "all", text: "All", label: "Show all updates" };
  const newest = { zoom: null, text: "Newest", label: "Follow the newest updates" };
  const chosen = ({ zoom: which, text, label }) => html`<button type="button" aria-pressed=${zoom === which}
    aria-label=${label} @click=${() => zoomTo(which)}>${text}</button>`;
  const button = (text, label, how) => html`<button type="button" aria-label=${label} title=${label} @click=${step(how)}>${text}</button>`;
  return html`<div class="chips zoom" role="group" aria-label="Stretch of time">
    ${chosen(newest)}${chosen(all)}
    ${button("+", "Zoom in", (now, most) => scaled(now, STRETCH, most))}
    ${button("−", "Zoom out", (now, most) => scaled(now, 1 / STRETCH, most))}
    ${button("←", "Earlier", (now, most) => moved(now, -STRETCH, most))}
    ${button("→", "Later", (now, most) => moved(now, STRETCH, most))}
  </div>`;
}

function legend(inView) {
  const kinds = Object.keys(KINDS).filter((kind) => inView.some((update) => update.kind === kind));
  const key = (shape, text) => html`<li><svg class="key line" viewBox="0 0 18 12" aria-hidden="true">${shape}</svg>${text}</li>`;
  return html`<ul class="legend" aria-label="Lines and bars over time">
    ${key(lineOf("load"), "p50")} ${key(lineOf("pause", "5 3"), "p95")}
    ${kinds.map((kind) => key(barOf(KINDS[kind]), kind === "handover" ? "hand-over" : kind))}
    ${inView.some(({ density }) => density !== null) ? key(dotOf("pause"), "changed") : nothing}
    ${inView.some(failed) ? key(crossOf(), "failed") : nothing}
  </ul>`;
}

const lineOf = (name, dash = "none") => svg`<path class="of-${name}" d="M0 6h18" stroke-width="2" stroke-dasharray=${dash} />`;
const barOf = (name) => svg`<rect class="stage ${name}" x="5" width="9" height="12" />`;
const dotOf = (name) => svg`<circle class="of-${name}" cx="9" cy="6" r="3" fill="none" stroke-width="1.5" />`;
const crossOf = () => svg`<path class="of-bad" d="m5 2 8 8m0-8-8 8" stroke-width="2" />`;

/** One update in words; the newest in sight while none is pointed at. */
function told(update) {
  const one = update ?? updates.findLast((each) => at(each) <= view.to) ?? null;
  if (one === null) return nothing;
  const stages = ordered(one.timings).map(({ name, ms }) => `${name} ${span(ms)}`);
  const lost = Object.entries(one.failed).map(([outcome, number]) => `${number} ${outcome}`);
  return html`<b>Step ${count(one.step)}</b> <span>${clock(one.created_at)}</span> <span>${one.kind}, ${size(one.bytes)}${one.density === null
        ? ""
        : `, ${share(one.density)} changed`}</span>
    ${stages.length > 0 ? html`<span class="wide">${stages.join(", ")}</span>` : nothing}
    ${one.pause === null ? nothing : html`<span>pause ${percentiles(one.pause)}</span>`}
    ${one.served === null ? nothing : html`<span>served ${percentiles(one.served)}</span>`}
    ${lost.length > 0 ? html`<span class="lost">failed: ${lost.join(", ")}</span>` : nothing}
    ${one.state === "REJECTED" || one.state === "LOST" ? html`<span class="lost">${one.state}: ${one.reason}</span>` : nothing}
    ${one.why_full === null ? nothing : html`<span>full, because ${one.why_full}</span>`}`;
}

/** What the updates in sight have in common: how many, how many failed, and why full ones were no deltas. */
function summary(inView) {
  const lost = inView.filter(failed).length;
  const reasons = whyFull(inView);
  return html`<p class="told">${plural(inView.length, "update")} in sight${lost > 0 ? `, ${count(lost)} with a failure` : ""}</p>
    ${reasons.length === 0
      ? nothing
      : html`<details class="why-full"><summary>Why ${plural(reasons.reduce((sum, [, number]) => sum + number, 0), "version")} went out in full</summary>
          <ul class="sentences">${reasons.map(([reason, number]) => html`<li>${number === 1 ? "once" : `${count(number)} times`}: ${reason}</li>`)}</ul>
        </details>`}`;
}

let frames = null;

// The charts' places, made once: uPlot keeps what it has drawn.
function places() {
  frames ??= CHARTS.map(({ title, meaning, chart }) => {
    const frame = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    caption.title = meaning;
    chart.node.setAttribute("role", "img");
    frame.append(caption, chart.node);
    node.append(frame);
    return frame;
  });
}

function drawCharts() {
  const width = node.clientWidth;
  if (width === 0 || view === null) return;
  const times = updates.map(at);
  const newest = updates.at(-1);
  for (const { title, data, newest: figure, chart } of CHARTS) {
    const label = `${title} of ${plural(updates.length, "update")}; step ${count(newest.step)}: ${figure(newest)}`;
    if (chart.node.ariaLabel !== label) chart.node.ariaLabel = label;
    chart.show([times, ...data()], view, width);
  }
  render(told(updates[pointed] ?? null), readout);
}

function measure() {
  const width = node.clientWidth - gutters().left - gutters().right;
  if (width > 0) change(({ history: past }) => (past.width = width));
}

new ResizeObserver(measure).observe(node);
onColours(() => CHARTS.forEach(({ chart }) => chart.redraw()));
node.addEventListener("mouseleave", () => point(null));
