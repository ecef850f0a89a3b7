// An update as stages one after the other, drawn to scale. The engine stands still in the tall ones. An update that pauses
// nothing has none, and neither has one of hosts, which pause their engines themselves.

import { html, svg } from "./vendor/lit-html/lit-html.js";
import { span } from "./format.js";

/** The stages in their order, each with what it is. */
export const STAGES = {
  publish: "the trainer writes the files",
  seen: "the service knows of it and waits until its files are complete",
  validate: "every byte is checked",
  copy: "a delta is written into a full copy, for engines that take no deltas",
  prepare: "the engine gets ready while it still serves; a host pulls and checks the version",
  pause: "generation is paused",
  load: "the engine loads",
  verify: "what it loaded is proved",
  resume: "generation goes on",
};
const STANDSTILL = new Set(["pause", "load", "verify", "resume"]);

/** Stages with their milliseconds, in order; what this page does not know of comes last. */
export function ordered(timings) {
  const known = Object.keys(STAGES).filter((name) => name in timings);
  const others = Object.keys(timings).filter((name) => !(name in STAGES));
  return [...known, ...others].map((name) => ({ name, ms: timings[name] }));
}

/** One after the other from `at` on: [{name, at, ms}]. */
export function stacked(timings, at = 0) {
  let begin = at;
  return ordered(timings).map(({ name, ms }) => {
    const stage = { name, at: begin, ms };
    begin += ms;
    return stage;
  });
}

export const total = (timings) => Object.values(timings).reduce((sum, ms) => sum + ms, 0);

/** When an update began: the trainer's call or, where its duration is not known, the first sight of the version. */
export const beginOf = (version) => Date.parse(version.created_at) - (version.timings.publish ?? 0);

/** The stages of one engine's load, placed where they were in the update. */
export const placed = (attempt, begin) => stacked(attempt.timings, Math.max(0, Date.parse(attempt.started_at) - begin));

/** Round marks for an axis that reaches `max`: at most five, at 1, 2 or 5 times a power of ten. */
export function ticks(max) {
  if (!(max > 0)) return [];
  const power = 10 ** Math.floor(Math.log10(max / 4));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => max / each <= 5);
  return Array.from({ length: Math.floor(max / step) }, (_, index) => (index + 1) * step);
}

/** The stages as a bar; `max` milliseconds fill its width. */
export function bar(stages, max, label) {
  const pauses = stages.some(({ name }) => name === "pause");
  const told = stages.map(({ name, ms }) => `${name} ${span(ms)}`).join(", ");
  return html`<svg class="bar" role="img" aria-label="${label}: ${told || "no stage has ended yet"}">
    ${stages.map((stage) => segment(stage, max, pauses))}
  </svg>`;
}

function segment({ name, at, ms }, max, pauses) {
  const known = name in STAGES ? name : "other";
  const tall = pauses && STANDSTILL.has(name);
  const width = Math.max((ms / max) * 100, 0.25);
  return svg`<rect class="stage ${known}" x="${(at / max) * 100}%" width="${width}%" y="${tall ? 0 : 4}"
    height="${tall ? 16 : 8}"><title>${name} ${span(ms)}: ${STAGES[name] ?? ""}</title></rect>`;
}

/** The marks above bars of the same width. */
export function axis(max) {
  return html`<svg class="axis" aria-hidden="true">
    ${ticks(max).map((at) => {
      const x = (at / max) * 100;
      return svg`<line x1="${x}%" x2="${x}%" y1="11" y2="16" /><text x="${x}%" y="9"
        text-anchor="${x > 90 ? "end" : "middle"}">${span(at)}</text>`;
    })}
  </svg>`;
}

/** What the colours of the stages of some updates mean. */
export const legend = (updates) => html`<ul class="legend" aria-label="Stages of an update">
  ${Object.entries(STAGES).filter(([name]) => updates.some(({ timings }) => name in timings)).map(
    ([name, meaning]) =>
      html`<li title=${meaning}>
        <svg class="key" viewBox="0 0 12 16" aria-hidden="true">
          <rect class="stage ${name}" width="12" y=${STANDSTILL.has(name) ? 0 : 4} height=${STANDSTILL.has(name) ? 16 : 8} />
        </svg>
        ${name}
      </li>`,
  )}
  <li class="hint">tall: the engine stands still</li>
</ul>`;
