// Charts over one time axis, drawn by uPlot. They show the same stretch, and the cursor is in all of them at once.

import uPlot from "./vendor/uplot/dist/uPlot.esm.js";
import { instant } from "./format.js";

const narrow = matchMedia("(max-width: 700px)");
const DAY = 86_400_000;
const FONT = '11px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

const GRID = { stroke: () => colour("faint"), width: 1 };

/** Pixels left of every plot and lane, and right of it: all begin and end one above the other. */
export const gutters = () => (narrow.matches ? { left: 62, right: 10 } : { left: 92, right: 46 });

/** A colour of the style sheet. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** The middles of the bars that are in sight, and how wide each may be, in pixels of the canvas. */
function places(u) {
  const [first, last] = u.series[0].idxs;
  const xs = [];
  for (let index = first; index <= last; index += 1) {
    const x = u.data[0][index];
    if (x >= u.scales.x.min && x <= u.scales.x.max) xs.push({ index, x: u.valToPos(x, "x", true) });
  }
  const gaps = xs.slice(1).map(({ x }, index) => x - xs[index].x).sort((one, other) => one - other);
  const usual = gaps.length > 0 ? gaps[gaps.length >> 1] : 40;
  const width = Math.min(Math.max(usual * 0.7, 2), 16);
  return { xs, width };
}

/** Draw a bar of each update: `parts(index)` are its parts from below, as {value, fill}. */
export const bars = (parts) => (u) => {
  const { xs, width } = places(u);
  const floor = u.bbox.top + u.bbox.height;
  for (const { index, x } of xs) {
    let below = 0;
    for (const { value, fill } of parts(index).filter(({ value }) => value > 0)) {
      const top = u.valToPos(below + value, "y", true);
      const bottom = below === 0 ? floor : u.valToPos(below, "y", true);
      u.ctx.fillStyle = fill;
      u.ctx.fillRect(x - width / 2, top, width, bottom - top);
      below += value;
    }
  }
};

/** Mark updates: a line through the plot and, with `cross`, a cross at its top. */
export const marks = (isMarked, cross) => (u) => {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = colour("bad");
  for (const { index, x } of places(u).xs.filter(({ index }) => isMarked(index))) {
    ctx.globalAlpha = 0.4;
    ctx.lineWidth = devicePixelRatio;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (!cross) continue;
    const arm = 3.5 * devicePixelRatio;
    const y = bbox.top - arm - 3 * devicePixelRatio;
    ctx.globalAlpha = 1;
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.beginPath();
    ctx.moveTo(x - arm, y - arm);
    ctx.lineTo(x + arm, y + arm);
    ctx.moveTo(x + arm, y - arm);
    ctx.lineTo(x - arm, y + arm);
    ctx.stroke();
  }
  ctx.restore();
};

// Round times of day, here: uPlot's own begin at some second of the minute.
function roundTimes(_u, _axis, from, to, step) {
  const offset = new Date(from).getTimezoneOffset() * 60_000;
  const first = Math.ceil((from - offset) / step) * step + offset;
  return Array.from({ length: Math.max(0, Math.floor((to - first) / step) + 1) }, (_, index) => first + index * step);
}

const times = (u, splits, _axis, _space, step) =>
  splits.map((split) => instant(split, { digits: step < 1000 ? 1 : step < 60_000 ? 0 : null, date: step >= DAY }));

const LINE = uPlot.paths.linear();
const POINTS = 150; // points in sight that can be told apart; more become a line

const isFew = (u) => u.series[0].idxs[1] - u.series[0].idxs[0] < POINTS;
const lineOfMany = (u, series, first, last) => (isFew(u) ? null : LINE(u, series, first, last));

const textsOf = (told) => (u, splits) => splits.map((split) => (split === null ? "" : told(split)));
const hasAny = (values) => values.some((value) => value !== null);

// From the power of ten below the least value on.
const decades = (u, least, most) => [10 ** Math.floor(Math.log10(least || 1) - 0.3), (most || 10) * 1.3];

// A logarithmic scale has a line and a text at the powers of ten alone.
const powersOfTen = (u, splits) =>
  splits.map((split) => (Number.isInteger(Number(Math.log10(split).toFixed(6))) ? split : null));
const DECADES = { ...GRID, filter: powersOfTen };

const axisOf = (more) => ({
  font: FONT,
  stroke: () => colour("muted"),
  grid: GRID,
  ticks: { show: false },
  gap: 6,
  ...more,
});

const pointsOf = (stroke, points) =>
  ({ show: points ? isFew : undefined, size: 5, stroke: () => colour(stroke), fill: () => colour("panel") });

function rightAxis(size, told) {
  const values = (u, splits) => (hasAny(u.data.at(-1)) ? textsOf(told)(u, splits) : []);
  return axisOf({ scale: "right", side: 1, size, space: 26, grid: { show: false }, filter: powersOfTen, values });
}

/**
 * One chart. `lines` are its series as {label, stroke, dash, points, scale}; `paint` draws bars and marks; `told` makes
 * the text of a value. With `right` there is a second, logarithmic scale, whose values that function makes texts of. `log` makes the
 * first scale logarithmic, `labels` adds the time below. `choose` is called with a stretch that was dragged over, `reset`
 * at a double click, `point` with the index of the update under the cursor, or null.
 */
export class Chart {
  constructor({ height, right = null, ...options }) {
    this.node = document.createElement("div");
    this.node.style.minHeight = `${height()}px`; // its place, before it is drawn: nothing below it moves then
    this.height = height;
    this.options = { right, ...options };
    this.plot = null;
    this.view = null;
    this.data = null;
  }

  /** Show `data` (times first) in the stretch `view`, as wide as there is room. */
  show(data, view, width) {
    this.view = view;
    const size = { width, height: this.height() };
    if (this.plot === null || this.wasNarrow !== narrow.matches) {
      this.plot?.destroy();
      this.plot = new uPlot(this._made(size), data, this.node);
      this.wasNarrow = narrow.matches;
      this.node.style.minHeight = "";
    } else {
      if (this.plot.width !== size.width || this.plot.height !== size.height) this.plot.setSize(size);
      this.plot.setData(data, false);
    }
    this.plot.setScale("x", { min: view.from, max: view.to });
  }

  /** Draw again: colours may have changed. */
  redraw() {
    this.plot?.redraw(false, true);
  }

  _made({ width, height }) {
    const { lines, paint, told, right, labels, log, choose, reset, point } = this.options;
    const { left, right: room } = gutters();
    const hasRight = right !== null && !narrow.matches;
    const select = (u) => {
      const { left: begin, width: length } = u.select;
      if (length < 4) return;
      u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      choose({ from: u.posToVal(begin, "x"), to: u.posToVal(begin + length, "x") });
    };
    return {
      width,
      height,
      ms: 1,
      pxAlign: 1,
      padding: [20, hasRight ? 0 : room, labels ? 0 : 7, 0],
      legend: { show: false },
      cursor: {
        y: false,
        sync: { key: "refitd" },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        bind: { dblclick: () => reset },
      },
      scales: {
        x: { time: true, range: () => [this.view.from, this.view.to] },
        y: log
          ? { distr: 3, range: decades }
          : { range: (u, _least, most) => [0, most > 0 ? most * 1.08 : 1] },
        right: { distr: 3, range: decades },
      },
      series: [
        {},
        ...lines.map(({ scale = "y", stroke, dash, points = false, hidden = false }) => ({
          scale,
          stroke: () => colour(stroke),
          width: 1.5,
          dash,
          paths: hidden ? () => null : points ? lineOfMany : undefined,
          spanGaps: true,
          points: hidden ? { show: false } : pointsOf(stroke, points),
        })),
      ],
      axes: [
        axisOf({ splits: roundTimes, values: times, size: labels ? 24 : 0, show: true, space: 70, ...(labels ? {} : { values: () => [] }) }),
        axisOf({ size: left, space: 26, values: textsOf(told), ...(log ? { filter: powersOfTen, grid: DECADES } : {}) }),
        ...(hasRight ? [rightAxis(room, right)] : []),
      ],
      hooks: {
        setSelect: [select],
        setCursor: [(u) => point(u.cursor.idx ?? null)],
        drawAxes: [(u) => paint(u)],
      },
    };
  }
}

/** Call `redraw` when the colours change. */
export const onColours = (redraw) => matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

export const isNarrow = () => narrow.matches;
