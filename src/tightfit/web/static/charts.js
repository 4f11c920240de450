// What all charts share: colours from the stylesheet, a size that follows the window, a new drawing when the scheme
// changes between light and dark, one crosshair, and one part of the x axis that is looked at, whatever comes in.

import uPlot from "/static/vendor/uplot/uPlot.esm.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
const LINE_PX = 13; // the height of a label within a chart
const TOP_PX = 18; // above the curves, for marks
const GUTTER_PX = 96; // beside them, for the names of levels

export const join = uPlot.join;

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** 1, 2, 5, 10, …; more of them where the scale has less than one power of ten. */
function logSplits(_, __, low, high) {
  const within = high / low < 8 ? [1, 1.5, 2, 3, 4, 5, 7] : high / low < 1000 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) found.push(...within.map((each) => each * 10 ** power));
  return found.filter((each) => each >= low && each <= high);
}

function axis(label, format, size, incrs) {
  const grid = { stroke: colour("--grid"), width: 1 };
  const font = `12px ${colour("--sans")}`;
  const made = { stroke: colour("--quiet"), grid, ticks: { ...grid, size: 4 }, font, labelFont: font, label, labelSize: label ? 18 : 0, labelGap: 0, gap: 4, size };
  if (incrs) made.incrs = incrs;
  if (format) made.values = (_, values) => values.map((value) => (value === null ? "" : format(value)));
  return made;
}

/** In the legend: the value under the crosshair, or without one the last that there is. */
function told(format) {
  return (plot, value, series, at) => {
    const known = at === null ? plot.data[series].findLast((each) => each !== null && each !== undefined) : value;
    return known === null || known === undefined ? "–" : format(known);
  };
}

/** What is looked at, in all charts of a page. `marks`: [{x, kind, label}, …], things that happened. */
export class View {
  constructor() {
    Object.assign(this, { charts: [], marks: [], zoom: null, log: false, chosen: () => {} });
    this.xLabel = "";
    this.xIncrs = null;
    this.xFormat = (value) => value.toLocaleString("en");
  }

  /** From here to there; null: all of it. */
  look(zoom) {
    this.zoom = zoom;
    for (const chart of this.charts) chart.look();
  }
}

/** A chart over steps or over time. */
export class Chart {
  /** `format`: of values in the legend; `ticks`: of those on the axis. */
  constructor(place, view, { format, ticks = format, range, incrs, canLog = false }) {
    Object.assign(this, { place, view, format, ticks, range, incrs, canLog });
    Object.assign(this, { series: [], bands: [], levels: [], data: [[]], shape: "" });
    view.charts.push(this);
    dark.addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.resize()).observe(place);
  }

  size() {
    return { width: Math.max(220, this.place.clientWidth), height: this.place.clientWidth < 360 ? 220 : 260 };
  }

  /** `series`: [{label, stroke: "--c1", dash, width, faint}, …] for the columns of `data` after the first. `levels`:
   *  [{label, value}, …] to draw across. */
  show(series, data, { bands = [], levels = [] } = {}) {
    const isLog = this.canLog && this.view.log;
    const shape = JSON.stringify([series, bands, isLog, this.view.xLabel, levels.length > 0]);
    this.levels = levels;
    this.data = isLog ? [data[0], ...data.slice(1).map((values) => values.map((value) => (value > 0 ? value : value === undefined ? value : null)))] : data;
    if (shape === this.shape) {
      this.plot.setData(this.data, false);
      this.look();
    } else {
      Object.assign(this, { shape, series, bands });
      this.draw();
    }
  }

  look() {
    const steps = this.data[0];
    if (!this.plot || !steps.length) return;
    const [min, max] = this.view.zoom ?? [steps[0], steps[steps.length - 1]];
    this.plot.setScale("x", min < max ? { min, max } : { min: min - 1, max: max + 1 });
  }

  draw() {
    const { view, format, ticks } = this;
    this.plot?.destroy();
    const isLog = this.canLog && view.log;
    const y = isLog ? { distr: 3, range: (_, low, high) => [(low || 1) * 0.9, (high || 1) * 1.1] } : this.range ? { range: this.range } : {};
    this.plot = new uPlot(
      {
        ...this.size(),
        padding: [TOP_PX, this.levels.length ? GUTTER_PX : 16, 0, 0],
        scales: { x: { time: false }, y },
        axes: [
          axis(view.xLabel, view.xFormat, 26, view.xIncrs),
          isLog ? { ...axis(null, ticks, 58), splits: logSplits, filter: (_, splits) => splits } : axis(null, ticks, 58, this.incrs),
        ],
        cursor: {
          points: { size: 6 },
          // A part is chosen for all charts at once, by `setSelect` below; and a double click shows all again.
          drag: { x: true, y: false, setScale: false },
          bind: { dblclick: () => () => view.chosen(null) },
          sync: { key: "run", filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } },
        },
        legend: { live: true },
        series: [
          { label: view.xLabel, value: told(view.xFormat) },
          ...this.series.map(({ faint, stroke, ...each }) => ({
            spanGaps: false,
            width: 1.5,
            points: { show: (plot) => plot.data[0].length < 3, size: 5 },
            value: told(format),
            ...each,
            stroke: colour(stroke) + (faint ? "70" : ""),
          })),
        ],
        bands: this.bands.map((band) => ({ ...band, fill: `${colour(band.fill)}40` })),
        hooks: { draw: [() => this.annotate()], setSelect: [() => this.choose()] },
      },
      this.data,
      this.place,
    );
    // What is drawn beside a curve and needs no figure of its own has no line in the legend.
    this.series.forEach((each, place) => { this.plot.root.querySelectorAll(".u-series")[place + 1].hidden = !each.label; });
    this.look();
  }

  choose() {
    const { left, width } = this.plot.select;
    if (width < 3) return;
    const zoom = [left, left + width].map((at) => this.plot.posToVal(at, "x"));
    this.plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.view.chosen(zoom);
  }

  /** Marks of the view down the chart, and levels across it. */
  annotate() {
    const { ctx, bbox } = this.plot;
    const ratio = devicePixelRatio;
    const line = (fromX, fromY, toX, toY) => {
      ctx.beginPath();
      ctx.moveTo(fromX, fromY);
      ctx.lineTo(toX, toY);
      ctx.stroke();
    };
    ctx.save();
    ctx.font = `${11 * ratio}px ${colour("--sans")}`;
    ctx.lineWidth = ratio;
    ctx.textAlign = "center";
    for (const mark of this.view.marks) {
      const at = Math.round(this.plot.valToPos(mark.x, "x", true));
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = colour({ rescue: "--warn", stop: "--bad" }[mark.kind] ?? "--quiet");
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      line(at, bbox.top, at, bbox.top + bbox.height);
      ctx.fillText(mark.label, at, bbox.top - 5 * ratio);
    }
    ctx.textAlign = "left";
    ctx.strokeStyle = colour("--c2");
    ctx.fillStyle = colour("--quiet");
    const right = bbox.left + bbox.width;
    for (const { label, at, labelAt } of this.placed()) {
      ctx.setLineDash([2 * ratio, 3 * ratio]);
      line(bbox.left, at, right, at);
      ctx.setLineDash([]);
      line(right, at, right + 7 * ratio, labelAt);
      ctx.fillText(label, right + 10 * ratio, labelAt + 4 * ratio);
    }
    ctx.restore();
  }

  /** Levels within the chart from below, whose labels do not cover each other. */
  placed() {
    const { top, height } = this.plot.bbox;
    const lines = [];
    for (const { label, value } of [...this.levels].sort((one, other) => one.value - other.value)) {
      const at = Math.round(this.plot.valToPos(value, "y", true));
      if (at < top || at > top + height) continue;
      const below = lines[lines.length - 1]?.labelAt ?? Infinity;
      lines.push({ label, at, labelAt: Math.min(at, below - LINE_PX * devicePixelRatio) });
    }
    return lines;
  }

  resize() {
    const wanted = this.size();
    if (this.plot && wanted.width !== this.plot.width) this.plot.setSize(wanted);
  }
}
