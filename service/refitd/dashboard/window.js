// The stretch of time that charts and lanes show: the newest updates, or what was zoomed to. Pure.

export const NEWEST = 100; // updates that are shown until something else is chosen
const SHORTEST = 1000; // milliseconds; a shorter stretch has nothing to read

/** When an update was first seen, in milliseconds. */
export const at = (update) => Date.parse(update.created_at);

/** Whether something went wrong with an update. */
export const failed = ({ state, failed }) => state === "REJECTED" || state === "LOST" || Object.keys(failed).length > 0;

/** The stretch that all of `updates` (the oldest first) and `moments` span, with some room at both ends. */
function around(updates, moments) {
  if (updates.length === 0) return null;
  const first = at(updates[0]);
  const last = Math.max(at(updates.at(-1)), ...moments.filter((moment) => moment >= first));
  const gap = (at(updates.at(-1)) - first) / Math.max(1, updates.length - 1);
  const room = Math.max(Math.min((last - first) * 0.02, gap / 2), SHORTEST / 2);
  return { from: first - room, to: last + room };
}

/** What is shown: `zoom` is null for the newest updates, "all", or {from, to}. Null where there is nothing. */
export function shown(zoom, updates, moments = []) {
  if (zoom !== null && zoom !== "all") return zoom;
  return around(zoom === "all" ? updates : updates.slice(-NEWEST), moments);
}

/** `view` narrowed to `share` of its length, or widened, around its middle, within `whole`. */
export function scaled(view, share, whole) {
  const middle = (view.from + view.to) / 2;
  const half = Math.max(((view.to - view.from) * share) / 2, SHORTEST / 2);
  return within({ from: middle - half, to: middle + half }, whole);
}

/** `view` moved by `share` of its length, within `whole`. */
export function moved(view, share, whole) {
  const by = (view.to - view.from) * share;
  return within({ from: view.from + by, to: view.to + by }, whole);
}

function within(view, whole) {
  const length = view.to - view.from;
  if (length >= whole.to - whole.from) return whole;
  const from = Math.min(Math.max(view.from, whole.from), whole.to - length);
  return { from, to: from + length };
}

/** What is known of updates by now: `found` (the newest first) in the place of what was known of them. Oldest first. */
export function merged(known, found, most = 1000) {
  const fresh = new Set(found.map(({ id }) => id));
  const all = [...(known ?? []).filter(({ id }) => !fresh.has(id)), ...[...found].reverse()];
  return all.sort((one, other) => at(one) - at(other)).slice(-most);
}

/** How often each reason led to a full version, the most frequent first: [[reason, count]]. */
export function whyFull(updates) {
  const counts = new Map();
  for (const { why_full: why } of updates) {
    if (why === null) continue;
    const reason = why.replace(/\d[\d,.]*/g, "…"); // figures differ from update to update
    counts.set(reason, (counts.get(reason) ?? 0) + 1);
  }
  return [...counts].sort((one, other) => other[1] - one[1]);
}
