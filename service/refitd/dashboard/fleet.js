// Which engines are looked at, and which of them come first.

// Engines that need an operator first, the healthy ones last.
export const ORDER = ["troubled", "away", "updating", "in sync"];

export const byNeed = (one, other) =>
  ORDER.indexOf(one.glance) - ORDER.indexOf(other.glance) || one.id.localeCompare(other.id, "en", { numeric: true });

/** The engines that are asked for. */
export function chosen(engines, { state, text, only }) {
  if (only !== null) return engines.filter(({ id }) => id === only);
  const words = text.trim().toLowerCase();
  const fits = (engine) => `${engine.id} ${engine.url} ${engine.reason ?? ""}`.toLowerCase().includes(words);
  return engines.filter((engine) => (state === null || engine.glance === state) && fits(engine)).sort(byNeed);
}
