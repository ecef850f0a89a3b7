// How numbers, sizes and times look. Pure.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
const whole = new Intl.NumberFormat("en-GB");

/** A count with thousands separated, a dash for what is not known. */
export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));

/** Bytes in decimal units, as disks are sold and as the command line shows them. */
export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  let value = bytes;
  let unit = 0;
  while (value >= 999.95 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return unit === 0 ? `${bytes} B` : `${value.toFixed(1)} ${UNITS[unit]}`;
}

/** Milliseconds with about three digits: 0.42 ms, 42 ms, 1.26 s, 3 min 10 s. */
export function span(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return "–";
  if (milliseconds < 9.95) return `${Number(milliseconds.toPrecision(2))} ms`;
  if (milliseconds < 999.5) return `${Math.round(milliseconds)} ms`;
  if (milliseconds < 99500) return `${Number((milliseconds / 1000).toPrecision(3))} s`;
  const seconds = Math.round(milliseconds / 1000);
  if (seconds < 5970) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** The time of day of an RFC 3339 instant, here; with the day where that is not today. */
export function clock(instant, now = new Date()) {
  const at = new Date(instant);
  const time = at.toLocaleTimeString("en-GB", { hour12: false });
  if (at.toDateString() === now.toDateString()) return time;
  return `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}

/** A state as people read it. */
export const words = (state) => state.replaceAll("_", " ");

/** "1 engine", "3 engines". */
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** The time of day of an instant on an axis: with so many digits of seconds, null for none; or the day alone. */
export function instant(moment, { digits = null, date = false } = {}) {
  const at = new Date(moment);
  if (date) return at.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  const seconds = digits === null ? {} : { second: "2-digit", fractionalSecondDigits: digits || undefined };
  const parts = { hour: "2-digit", minute: "2-digit", ...seconds };
  return at.toLocaleTimeString("en-GB", { hour12: false, ...parts });
}

/** A share as a percentage with two digits: 0.42 %, 12 %. */
export function share(value) {
  if (value === null || value === undefined) return "–";
  return `${Number((value * 100).toPrecision(2))} %`;
}
