// Which engines are looked at, and which of them come first.

// States that need an operator first, the healthy ones last.
const TROUBLED = ["CONTESTED", "QUARANTINED", "TAINTED", "NACKED", "UNREACHABLE"];
export const ORDER = [...TROUBLED, "PROBING", "UPDATING", "VERIFYING", "BEHIND", "IN_SYNC"];

export const byNeed = (one, other) =>
  ORDER.indexOf(one.state) - ORDER.indexOf(other.state) || one.id.localeCompare(other.id, "en", { numeric: true });

/** The engines that are asked for. */
export function chosen(engines, { state, text, only }) {
  if (only !== null) return engines.filter(({ id }) => id === only);
  const words = text.trim().toLowerCase();
  const fits = (engine) => `${engine.id} ${engine.url} ${engine.reason ?? ""}`.toLowerCase().includes(words);
  return engines.filter((engine) => (state === null || engine.state === state) && fits(engine)).sort(byNeed);
}
