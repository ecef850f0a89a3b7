// The event stream, read with fetch: EventSource can send no token. Resumed where it broke off.

import { headers, problemOf } from "./api.js";

const SILENCE = 40_000; // the service says something every 15 seconds: one that is silent for longer is gone
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 15_000;

/** How long to wait before try number `tried` (from 1), in milliseconds: doubling, with jitter so that tabs spread. */
export const pauseBefore = (tried, chance) =>
  Math.min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (tried - 1)) * (0.5 + chance / 2);

/** Splits a stream of text into events (WHATWG's format). `rest` is what has not ended yet. */
export function parse(text) {
  const parts = text.split("\n\n");
  const rest = parts.pop();
  const events = [];
  for (const part of parts) {
    const data = part.split("\n").filter((line) => line.startsWith("data:"));
    if (data.length > 0) events.push(JSON.parse(data.map((line) => line.slice(5).trimStart()).join("\n")));
  }
  return { events, rest };
}

/**
 * Follow the stream for ever. `from` is the event that was seen last. `hear` gets events as they come, a batch at a
 * time; `tell` gets {state: "live"}, {state: "lost", reason, retryAt} or {state: "refused", problem}, which ends it.
 */
export async function follow({ from, hear, tell, hurry }) {
  let position = from;
  let tried = 0;
  for (;;) {
    let reason = "the connection ended";
    try {
      await read(position, (events) => {
        position = events.at(-1).seq;
        hear(events);
      }, () => {
        tried = 0;
        tell({ state: "live" });
      });
    } catch (problem) {
      if (problem.wantsToken) return tell({ state: "refused", problem });
      reason = problem.status ? problem.message : "the service does not answer";
    }
    tried += 1;
    const pause = pauseBefore(tried, Math.random());
    tell({ state: "lost", reason, retryAt: Date.now() + pause });
    await Promise.race([new Promise((done) => setTimeout(done, pause)), hurry()]);
  }
}

async function read(position, hear, opened) {
  const gone = new AbortController();
  let watchdog = setTimeout(() => gone.abort(), SILENCE);
  try {
    const sent = headers({ Accept: "text/event-stream", "Last-Event-ID": String(position) });
    const response = await fetch("/v1/events", { headers: sent, cache: "no-store", signal: gone.signal });
    if (!response.ok) throw await problemOf(response);
    opened();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(watchdog);
      watchdog = setTimeout(() => gone.abort(), SILENCE);
      const { events, rest } = parse(text + value);
      text = rest;
      if (events.length > 0) hear(events);
    }
  } finally {
    clearTimeout(watchdog);
    gone.abort();
  }
}
