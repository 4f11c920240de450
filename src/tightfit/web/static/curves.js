// The curves of one run, or of several over each other. The server keeps a curve short and says from which point on it
// has changed; here the same points are kept and no more, so that a page can stay open for as long as a run takes.

import { Chart, View, join } from "/static/charts.js";
import { become, el, put } from "/static/parts.js";

const GIB = 2 ** 30;
export const whole = (number) => Math.round(number).toLocaleString("en");
export const size = (bytes) => {
  if (bytes === null || bytes === undefined) return "–";
  return bytes >= GIB / 2 ? `${(bytes / GIB).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
};
export const lossWords = (loss) => (loss === null || loss === undefined ? "–" : loss.toFixed(4));
export const fill = (text, values) => text.replace(/\{(\w+)\}/g, (_, key) => values[key] ?? "");
const short = (value) => Number(value.toPrecision(4)).toString();
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const tickSize = (bytes) => (bytes === 0 ? "0" : bytes >= GIB / 2 ? `${short(bytes / GIB)} GiB` : `${short(bytes / 2 ** 20)} MiB`);
const power = (value) => (value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : short(value));

// The columns of a point, as history.py sends them.
const STEP = 0, LOSS = 1, LOW = 2, HIGH = 3, PACE = 4, NOW = 5, PEAK = 6, HOST = 7, AT = 8, RATE = 9, NORM = 10, RANKS = 11;
const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const FEW_RANKS = 8; // up to here each has a line
const SHARES = { all: 1, half: 0.5, tenth: 0.1 };
const ROWS = 60; // of a table
const TIMES = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 432000, 864000]; // seconds

export function emptyRun(name) {
  return { name, points: [], each: 1, evaluations: [], marks: [], pace: null, memory: { planned: null, card: null, on_gpu: false, phases: [] } };
}

/** Points as they come in a message. */
export function takePoints(run, { start, each, rows }) {
  run.points.length = Math.min(run.points.length, start);
  run.points.push(...rows);
  run.each = each;
}

/** The running mean of those that are numbers, the last ones counting most; without a pull towards its first value. */
function smooth(values, weight) {
  let sum = 0, weights = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    weights = weight * weights + (1 - weight);
    return sum / weights;
  });
}

export class Curves {
  constructor(words, runs, phaseNames = {}) {
    Object.assign(this, { words, runs, phaseNames, drawing: 0 });
    const view = (this.view = new View());
    const fromZero = (_, low, high) => [0, (high || 1) * 1.1];
    const bytes = { format: size, ticks: tickSize, range: fromZero, incrs: Array.from({ length: 30 }, (_, number) => 2 ** (number + 16)) }; // whole GiB
    const made = {
      loss: { format: short, canLog: true },
      evaluation: { format: short, canLog: true },
      pace: { format: whole, ticks: (value) => compact.format(value).toLowerCase(), range: fromZero },
      memory: bytes,
      host: bytes,
      ranks: bytes,
      rate: { format: power, canLog: true },
      norm: { format: power, canLog: true },
    };
    this.charts = {};
    for (const [name, given] of Object.entries(made)) {
      const place = document.getElementById(`c-${name}`);
      if (place) this.charts[name] = new Chart(place, view, given);
    }
    this.listen();
    for (const place of document.querySelectorAll("[data-curve-table]")) place.parentElement.addEventListener("toggle", () => this.draw());
  }

  // --- how they are looked at: kept in the address, so that a link or a reload shows the same --------------------

  listen() {
    const tools = (this.tools = Object.fromEntries(["smooth", "log", "axis", "range", "whole"].map((name) => [name, document.getElementById(`tool-${name}`)])));
    const asked = new URLSearchParams(location.search);
    if (asked.has("smooth")) tools.smooth.value = asked.get("smooth");
    tools.log.checked = asked.get("log") === "1";
    for (const [name, tool] of [["axis", tools.axis], ["range", tools.range]]) {
      if ([...tool.options].some((option) => option.value === asked.get(name))) tool.value = asked.get(name);
    }
    this.zoom = asked.has("from") && asked.has("to") ? [Number(asked.get("from")), Number(asked.get("to"))] : null;
    if (this.zoom?.some(Number.isNaN)) this.zoom = null;
    const changed = () => {
      this.remember();
      this.draw();
    };
    tools.smooth.addEventListener("input", changed);
    tools.log.addEventListener("change", changed);
    tools.axis.addEventListener("change", () => {
      this.zoom = null; // it was of the other axis
      changed();
    });
    tools.range.addEventListener("change", () => {
      this.zoom = null;
      changed();
    });
    tools.whole.addEventListener("click", () => this.view.chosen(null));
    this.view.chosen = (zoom) => {
      this.zoom = zoom;
      tools.range.value = "all";
      if (zoom === null) tools.range.focus({ preventScroll: true });
      changed();
    };
  }

  remember() {
    const { smooth: weight, log, axis, range } = this.tools;
    const address = new URL(location.href);
    const said = { smooth: weight.value, log: log.checked ? "1" : "", axis: axis.value, range: range.value, from: this.zoom?.[0].toFixed(1), to: this.zoom?.[1].toFixed(1) };
    const usual = { smooth: weight.defaultValue, axis: "step", range: "all" };
    for (const [key, value] of Object.entries(said)) {
      if (value === undefined || value === "" || value === usual[key]) address.searchParams.delete(key);
      else address.searchParams.set(key, value);
    }
    history.replaceState(null, "", address);
  }

  // --- drawing ---------------------------------------------------------------------------------------------------

  draw() {
    if (!this.drawing) this.drawing = requestAnimationFrame(() => { this.drawing = 0; this.drawNow(); });
  }

  drawNow() {
    const { words, view, runs, tools } = this;
    const byTime = tools.axis.value === "time";
    view.log = tools.log.checked;
    view.xLabel = byTime ? words.since_start : words.step;
    view.xFormat = byTime ? clock : (value) => value.toLocaleString("en");
    view.xIncrs = byTime ? TIMES : null;
    put(document.getElementById("smooth-said"), Number(tools.smooth.value).toFixed(2));
    const begins = new Map(runs.map((run) => [run, run.points.find((point) => point[AT] !== null)?.[AT] ?? 0]));
    this.places = (run) => (byTime ? run.points.map((point) => (point[AT] === null ? null : point[AT] - begins.get(run))) : column(run, STEP));
    // A step that stands alone, as that of an evaluation, has the time of the point that it is in.
    this.place = (run, step) => (byTime ? (pointOf(run, step)?.[AT] ?? begins.get(run)) - begins.get(run) : step);
    view.marks = runs.length > 1 ? [] : this.markPlaces(runs[0], begins.get(runs[0]), byTime);
    const last = Math.max(0, ...runs.flatMap((run) => this.places(run).slice(-1)));
    const share = SHARES[tools.range.value];
    view.zoom = this.zoom ?? (share === 1 ? null : [last * (1 - share), last]);
    tools.whole.hidden = view.zoom === null;
    if (runs.length > 1) this.drawSeveral();
    else this.drawOne(runs[0]);
  }

  markPlaces(run, begin, byTime) {
    return run.marks.map((mark, number) => ({
      x: byTime ? (mark.at ?? begin) - begin : mark.step, kind: mark.kind, label: `${MARKS[mark.kind]}${number + 1}`,
    }));
  }

  /** One table of x and columns for each run; those whose x is not known are left out. */
  table(run, ...columns) {
    const places = this.places(run);
    const known = places.map((_, number) => number).filter((number) => places[number] !== null);
    return [places, ...columns].map((values) => known.map((number) => values[number]));
  }

  evaluated(run) {
    const rows = run.evaluations.map(({ step, loss }) => [this.place(run, step), loss]).sort((one, other) => one[0] - other[0]);
    return [rows.map((row) => row[0]), rows.map((row) => row[1])];
  }

  drawOne(run) {
    const { words, charts } = this;
    const flat = (value) => run.points.map(() => value ?? null);
    const weight = Number(this.tools.smooth.value);
    const losses = column(run, LOSS);
    // What nobody measures is not drawn.
    const show = (chart, series, options = {}) => {
      const has = series.filter(({ values }) => values.some((value) => value !== null && value !== undefined));
      const data = this.table(run, ...has.map(({ values }) => values));
      const drawn = has.map(({ values, ...each }) => each);
      const panel = chart.place.closest(".panel");
      if (panel.hasAttribute("data-optional")) panel.hidden = !has.length;
      if (options.extra?.[0].length) return chart.show([...drawn, options.more], join([data, options.extra]), options);
      return chart.show(drawn, data, options);
    };
    const band = run.each > 1;
    const smoothed = weight > 0;
    show(charts.loss, [
      ...(band ? [
        { label: words.high, stroke: "--c6", width: 0.5, points: { show: false }, values: column(run, HIGH) },
        { label: words.low, stroke: "--c6", width: 0.5, points: { show: false }, values: column(run, LOW) },
      ] : []),
      { label: smoothed ? words.raw : words.loss, stroke: "--c1", faint: smoothed, width: smoothed ? 1 : 1.5, values: losses },
      ...(smoothed ? [{ label: words.smoothed, stroke: "--c1", width: 2, values: smooth(losses, weight) }] : []),
    ], {
      bands: band && losses.some((loss) => loss !== null) ? [{ series: [1, 2], fill: "--c6" }] : [],
      extra: this.evaluated(run),
      more: { label: words.evaluation, stroke: "--c2", width: 1.5, spanGaps: true, points: { show: true, size: 6 } },
    });
    show(charts.pace, [
      { label: words.pace, stroke: "--c3", values: column(run, PACE) },
      { label: words.planned, stroke: "--c2", dash: [8, 5], values: flat(run.pace) },
    ]);
    const { planned, card, phases } = run.memory;
    const host = { label: words.now, stroke: "--c3", values: column(run, HOST) };
    const onGpu = run.points.some((point) => point[PEAK] !== null);
    put(document.getElementById("t-memory"), onGpu ? words.memory : words.host);
    show(charts.host, onGpu ? [host] : []);
    show(charts.memory, [
      ...(onGpu ? [
        { label: words.now, stroke: "--c1", values: column(run, NOW) },
        { label: words.peak, stroke: "--c4", values: column(run, PEAK) },
      ] : [host]),
      { label: words.planned, stroke: "--c2", dash: [8, 5], values: flat(planned) },
      { label: words.total, stroke: "--c8", width: 2, values: flat(card) },
    ], { levels: phases.map((phase) => ({ label: this.phaseNames[phase.name] ?? phase.name, value: phase.planned })) });
    show(charts.ranks, rankSeries(run, words));
    show(charts.rate, [{ label: words.rate, stroke: "--c4", values: column(run, RATE) }]);
    show(charts.norm, [{ label: words.norm, stroke: "--c7", values: column(run, NORM) }]);
    this.describe("d-loss", LOSS, lossWords, LOW, HIGH);
    this.describe("d-pace", PACE, whole);
    this.describe("d-memory", onGpu ? PEAK : HOST, size);
    this.describe("d-rate", RATE, power);
    this.describe("d-norm", NORM, power);
    this.tabulate("loss", [[words.loss, LOSS, lossWords], [words.low, LOW, lossWords], [words.high, HIGH, lossWords]]);
    this.tabulate("pace", [[words.pace, PACE, orNone(whole)]]);
    this.tabulate("memory", [[words.now, NOW, size], [words.peak, PEAK, size], [words.host, HOST, size]]);
    this.tabulate("rate", [[words.rate, RATE, orNone(power)]]);
    this.tabulate("norm", [[words.norm, NORM, orNone(power)]]);
  }

  drawSeveral() {
    const { charts, runs } = this;
    const weight = Number(this.tools.smooth.value);
    const draw = (chart, tableOf, spec = () => [{}]) => {
      const shown = runs.map((run, number) => ({ run, number, table: tableOf(run) }))
        .filter(({ table }) => table.slice(1).some((values) => values.some((value) => value !== null && value !== undefined)));
      chart.place.closest(".panel").hidden = !shown.length;
      if (!shown.length) return;
      const series = shown.flatMap(({ run, number }) => spec().map((each) => ({ label: run.name, stroke: COLOURS[number], spanGaps: true, ...each })));
      chart.show(series, join(shown.map(({ table }) => table)));
    };
    const raw = { label: "", faint: true, width: 1 };
    if (weight > 0) draw(charts.loss, (run) => this.table(run, column(run, LOSS), smooth(column(run, LOSS), weight)), () => [raw, { width: 2 }]);
    else draw(charts.loss, (run) => this.table(run, column(run, LOSS)));
    draw(charts.evaluation, (run) => this.evaluated(run), () => [{ points: { show: true, size: 6 } }]);
    draw(charts.pace, (run) => this.table(run, column(run, PACE)));
    draw(charts.memory, (run) => this.table(run, column(run, run.memory.on_gpu ? PEAK : HOST)));
    draw(charts.rate, (run) => this.table(run, column(run, RATE)));
    draw(charts.norm, (run) => this.table(run, column(run, NORM)));
  }

  // --- for those who do not see them -----------------------------------------------------------------------------

  describe(id, place, format, low = place, high = place) {
    const { words, runs: [run] } = this;
    const where = document.getElementById(id);
    const known = run.points.filter((point) => point[place] !== null);
    if (!known.length) return put(where, words.curve_none);
    const first = known[0], last = known[known.length - 1];
    let least = Infinity, most = -Infinity;
    for (const point of known) {
      least = Math.min(least, point[low] ?? Infinity);
      most = Math.max(most, point[high] ?? -Infinity);
    }
    const said = fill(words.curve, {
      first: format(first[place]), last: format(last[place]), from: whole(first[STEP]), to: whole(last[STEP]),
      low: format(least), high: format(most),
    });
    return put(where, run.each > 1 ? `${said} ${fill(words.each, { count: whole(run.each) })}` : said);
  }

  /** A curve as a table, of some sixty of its points. `columns`: each its name, its place in a point, and its words. */
  tabulate(name, columns) {
    const { words, runs: [run] } = this;
    const place = document.getElementById(`table-${name}`);
    if (!place.parentElement.open) return;
    const line = (first, cells, kind) => {
      const row = el("tr");
      row.append(el("th", first, { scope: kind === "th" ? "col" : "row", class: "number" }));
      for (const cell of cells) row.append(el(kind, cell, kind === "th" ? { scope: "col", class: "number" } : { class: "number" }));
      return row;
    };
    const every = Math.max(1, Math.ceil(run.points.length / ROWS));
    const shown = run.points.filter((_, number) => number % every === 0 || number === run.points.length - 1);
    const [table, top, body] = ["table", "thead", "tbody"].map((kind) => el(kind));
    top.append(line(words.step, columns.map(([title]) => title), "th"));
    body.append(...shown.map((point) => line(whole(point[STEP]), columns.map(([, at, format]) => format(point[at])), "td")));
    table.append(top, body);
    become(place, [table]);
  }
}

export function leastLoss(run) {
  return run.points.reduce((least, point) => (point[LOW] === null ? least : Math.min(least ?? Infinity, point[LOW])), null);
}

export const MARKS = { restart: "↻", rescue: "◆", resumed: "↻", stop: "✗" };
const orNone = (format) => (value) => (value === null ? "–" : format(value));
const column = (run, place) => run.points.map((point) => point[place]);

function pointOf(run, step) {
  return run.points.find((point) => point[STEP] >= step) ?? run.points[run.points.length - 1];
}

/** `2:05` or `3:00:07`, hours, minutes and seconds. */
function clock(seconds) {
  const all = Math.round(Math.abs(seconds));
  const [hours, minutes, rest] = [Math.floor(all / 3600), Math.floor(all / 60) % 60, all % 60];
  const two = (number) => String(number).padStart(2, "0");
  return (seconds < 0 ? "-" : "") + (hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`);
}

/** A line a rank; of many the least, the most, and rank 0. */
function rankSeries(run, words) {
  const ranks = column(run, RANKS);
  const count = Math.max(0, ...ranks.map((each) => each?.length ?? 0));
  if (count < 2) return [];
  const of = (rank) => ranks.map((each) => each?.[rank] ?? null);
  const line = (rank, stroke) => ({ label: `rank ${rank}`, stroke, values: of(rank) });
  if (count <= FEW_RANKS) return Array.from({ length: count }, (_, rank) => line(rank, COLOURS[rank]));
  const extreme = (pick) => ranks.map((each) => (each ? pick(...each) : null));
  return [
    { label: words.least_rank, stroke: "--c6", values: extreme(Math.min) },
    { label: words.most_rank, stroke: "--c2", values: extreme(Math.max) },
    line(0, "--c1"),
  ];
}
