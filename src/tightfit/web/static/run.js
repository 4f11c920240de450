// One run, live. The server keeps the curve short and says from which point on it has changed; this page keeps the same
// points and no more, so that it can stay open for as long as the run takes.

import { Chart } from "/static/charts.js";
import { Teller, become, el, fetched, isRefused, put as write, slide } from "/static/parts.js";

const GIB = 2 ** 30;
const { run: words, states } = JSON.parse(document.getElementById("words").textContent);
const name = document.getElementById("run").dataset.run;
const at = (id) => document.getElementById(id);
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (_, key) => values[key] ?? "");
const whole = (number) => Math.round(number).toLocaleString("en");
const size = (bytes) => {
  if (bytes === null || bytes === undefined) return "–";
  return bytes >= GIB / 2 ? `${(bytes / GIB).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
};
const lossWords = (loss) => (loss === null || loss === undefined ? "–" : loss.toFixed(4));

// What has no Chinese form is English.
const tongue = (text) => (/[\u4e00-\u9fff]/.test(text) ? {} : { lang: "en" });

// The columns of a point, as series.py sends them.
const STEP = 0, LOSS = 1, LOW = 2, HIGH = 3, PACE = 4, NOW = 5, PEAK = 6, HOST = 7;

const seen = {
  points: [], each: 1, memory: { rows: [], planned: null, card: null, on_gpu: false }, over: false, warnings: [], refused: false,
};
const title = document.title;
const teller = new Teller(at("said"));

const put = (id, text) => write(at(id), text);

// --- curves ------------------------------------------------------------------------------------

const charts = {
  loss: new Chart(at("c-loss"), {
    xLabel: words.step,
    format: (value) => Number(value.toPrecision(4)).toString(),
    series: [
      { label: words.high, stroke: "--c6", width: 0.5, points: { show: false } },
      { label: words.low, stroke: "--c6", width: 0.5, points: { show: false } },
      { label: words.loss, stroke: "--c1" },
    ],
    bands: [{ series: [1, 2], fill: "--c6" }],
  }),
  pace: new Chart(at("c-pace"), {
    xLabel: words.step,
    format: whole,
    range: (_, low, high) => [0, (high || 1) * 1.1],
    series: [{ label: words.pace, stroke: "--c3" }, { label: words.planned, stroke: "--c2", dash: [8, 5] }],
  }),
  memory: new Chart(at("c-memory"), {
    xLabel: words.step,
    format: size,
    incrs: Array.from({ length: 30 }, (_, power) => 2 ** (power + 16)), // whole GiB, not whole billions
    range: (_, low, high) => [0, (high || 1) * 1.1],
    series: [
      { label: words.now, stroke: "--c1" },
      { label: words.peak, stroke: "--c4", dash: [3, 3] },
      { label: words.planned, stroke: "--c2", dash: [8, 5] },
      { label: words.total, stroke: "--c8", width: 2 },
      { label: words.host, stroke: "--c3", dash: [1, 3] },
    ],
  }),
};

let drawing = 0;
function draw() {
  if (!drawing) drawing = requestAnimationFrame(() => { drawing = 0; drawNow(); });
}

function column(place) {
  return seen.points.map((point) => point[place]);
}

function drawNow() {
  const steps = column(STEP);
  const flat = (value) => steps.map(() => value ?? null);
  const { planned, card } = seen.memory;
  charts.loss.show([steps, column(HIGH), column(LOW), column(LOSS)]);
  charts.pace.show([steps, column(PACE), flat(seen.planned_pace)]);
  charts.memory.show([steps, column(NOW), column(PEAK), flat(planned), flat(card), column(HOST)]);
  describe("d-loss", LOSS, lossWords, LOW, HIGH);
  describe("d-pace", PACE, whole, PACE, PACE);
  describe("d-memory", seen.memory.on_gpu ? PEAK : HOST, size);
  for (const [id, columns] of Object.entries(TABLES)) if (at(id).parentElement.open) tabulate(at(id), columns);
}

function describe(id, place, format, low = place, high = place) {
  const known = seen.points.filter((point) => point[place] !== null);
  if (!known.length) return put(id, words.curve_none);
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
  put(id, seen.each > 1 ? `${said} ${fill(words.each, { count: whole(seen.each) })}` : said);
}

// Each curve as a table, of some sixty of its points: the name of a column, its place in a point, and its words.
const orNone = (format) => (value) => (value === null ? "–" : format(value));
const TABLES = {
  "table-loss": [[words.loss, LOSS, lossWords], [words.low, LOW, lossWords], [words.high, HIGH, lossWords]],
  "table-pace": [[words.pace, PACE, orNone(whole)]],
  "table-memory": [[words.now, NOW, size], [words.peak, PEAK, size], [words.host, HOST, size]],
};
const ROWS = 60;

function tabulate(place, columns) {
  const line = (first, cells, kind) => {
    const row = el("tr");
    row.append(el("th", first, { scope: kind === "th" ? "col" : "row", class: "number" }));
    for (const cell of cells) row.append(el(kind, cell, kind === "th" ? { scope: "col", class: "number" } : { class: "number" }));
    return row;
  };
  const every = Math.max(1, Math.ceil(seen.points.length / ROWS));
  const shown = seen.points.filter((_, number) => number % every === 0 || number === seen.points.length - 1);
  const [table, top, body] = ["table", "thead", "tbody"].map((kind) => el(kind));
  top.append(line(words.step, columns.map(([title]) => title), "th"));
  body.append(...shown.map((point) => line(whole(point[STEP]), columns.map(([, column, format]) => format(point[column])), "td")));
  table.append(top, body);
  become(place, [table]);
}
for (const id of Object.keys(TABLES)) at(id).parentElement.addEventListener("toggle", () => draw());

// --- sections ----------------------------------------------------------------------------------

const show = {
  series({ start, each, rows }) {
    seen.points.length = Math.min(seen.points.length, start);
    seen.points.push(...rows);
    seen.each = each;
    draw();
  },

  head(head) {
    const state = states[head.state];
    const place = at("state");
    const said = [state.name];
    if (head.exit_code) said.push(fill(words.exit_code, { code: head.exit_code }));
    if (head.host) said.push(fill(words.on_host, { host: head.host }));
    const text = said.join(", ");
    if (place.dataset.said !== text) {
      const line = el("span", null, { class: state.mood });
      line.append(el("span", state.mark, { class: "mark", "aria-hidden": "true" }), ` ${text}`);
      place.replaceChildren(line);
      place.dataset.said = text;
      place.dataset.state = head.state;
      document.title = `${state.mark} ${title}`;
    }
    const steps = head.steps === null ? "" : ` / ${whole(head.steps)}`;
    put("f-step", head.step === null ? "–" : `${whole(head.step)}${steps}`);
    put("f-loss", head.has_step && head.loss === null ? words.nan : lossWords(head.loss));
    put("f-pace", head.tokens_per_s === null ? "–" : whole(head.tokens_per_s));
    put("f-planned", head.planned_tokens_per_s === null ? "–" : whole(head.planned_tokens_per_s));
    put("f-left", head.left ?? "–");
    const ranks = head.ranks === null ? "" : `, ${fill(words.ranks, { count: head.ranks })}`;
    put("f-model", head.model === null ? "–" : `${head.model}, ${head.how}${ranks}`);
    put("f-attempt", head.attempt === null ? "–" : String(head.attempt));
    put("command", head.command ? `${words.command} ${head.command}` : "");
    seen.planned_pace = head.planned_tokens_per_s;
    seen.doing = head.doing;
    seen.quiet = head.quiet;
    seen.over = !["running", "elsewhere", "unknown"].includes(head.state);
    draw();
    connection();
  },

  trouble({ why }) {
    seen.trouble = why;
    connection();
  },

  reading({ share }) {
    seen.share = share;
    connection();
  },

  memory(memory) {
    seen.memory = memory;
    const rows = [...memory.rows];
    if (memory.host) rows.push({ name: words.host_ram, now: memory.host.used, peak: null, planned: null, total: memory.host.total });
    become(at("memory"), rows.map(memoryRow));
    at("no-memory").hidden = rows.length > 0;
    draw();
  },

  lights({ lights, warnings }) {
    const marks = { green: "✓", yellow: "!", red: "✗", unknown: "?" };
    const moods = { green: "good", yellow: "warn", red: "bad", unknown: "quiet" };
    become(at("lights"), lights.map((light) => {
      const line = el("li", null, { class: moods[light.colour] });
      line.append(el("span", marks[light.colour], { class: "mark", "aria-hidden": "true" }));
      line.append(el("span", `${words.colour[light.colour]}: `, { class: "hidden-text" }));
      line.append(words.light[light.name]);
      if (light.text) line.append(": ", el("span", light.text, tongue(light.text)));
      return line;
    }));
    become(at("warnings"), warnings.map((text) => el("p", `! ${text}`, { class: "notice warn", ...tongue(text) })));
    seen.warnings = warnings;
  },

  attempts(attempts) {
    slide(at("attempts"), [...attempts].reverse(), attemptRow);
    at("attempts").parentElement.hidden = attempts.length === 0;
    at("no-attempts").hidden = attempts.length > 0;
  },

  checkpoints(checkpoints) {
    slide(at("checkpoints"), checkpoints, (each) => {
      const row = el("tr");
      row.append(el("th", whole(each.step), { scope: "row", class: "number" }));
      row.append(cell(words.written, (each.written ?? "–").replace("T", " ").slice(0, 19)));
      row.append(cell(words.size, size(each.bytes), "number"));
      row.append(each.torn === null ? cell(words.whole, words.is_whole, "good") : cell(words.whole, fill(words.torn, { why: each.torn }), "bad"));
      return row;
    });
    at("checkpoints").parentElement.hidden = checkpoints.length === 0;
    at("no-checkpoints").hidden = checkpoints.length > 0;
  },

  events(events) {
    const list = at("events");
    const follows = list.scrollTop + list.clientHeight >= list.scrollHeight - 8;
    slide(list, events, (event) => {
      const line = el("li", null, { class: event.mood, ...tongue(event.text) });
      if (event.at !== null) line.append(el("time", new Date(event.at * 1000).toLocaleTimeString("en-GB"), { datetime: new Date(event.at * 1000).toISOString() }));
      line.append(event.text);
      return line;
    });
    list.hidden = events.length === 0;
    at("no-events").hidden = events.length > 0;
    if (follows) list.scrollTop = list.scrollHeight;
  },

  logs(logs) {
    const choice = at("log-name");
    const names = logs.map((log) => log.name);
    if ([...choice.options].map((option) => option.value).join("\n") !== names.join("\n")) {
      const chosen = choice.value;
      choice.replaceChildren(...names.map((each) => el("option", each, { value: each })));
      if (names.includes(chosen)) choice.value = chosen;
    }
    choice.disabled = names.length === 0;
    at("no-log").hidden = names.length > 0;
    at("log").hidden = names.length === 0;
    const log = logs.find((each) => each.name === choice.value);
    if (log) readLog(log.name, log.bytes);
  },
};

function cell(title, text, kind = "") {
  const made = el("td", null, { "data-name": title });
  if (kind) made.className = kind;
  made.append(el("span", text));
  return made;
}

function memoryRow(row) {
  const line = el("tr");
  line.append(el("th", row.name, { scope: "row" }));
  const end = Math.max(row.total ?? 0, row.planned ?? 0, row.peak ?? 0, row.now ?? 0) || 1;
  const bar = el("div", null, { class: "bar", "aria-hidden": "true" });
  for (const part of ["peak", "now"]) {
    const span = el("span", null, { class: part });
    span.style.width = `${(100 * (row[part] ?? 0)) / end}%`;
    bar.append(span);
  }
  if (row.planned !== null) {
    const mark = el("span", null, { class: "plan" });
    mark.style.left = `${(100 * row.planned) / end}%`;
    bar.append(mark);
  }
  const drawn = el("td", null, { "data-name": "" });
  drawn.append(bar);
  line.append(drawn, ...["now", "peak", "planned", "total"].map((part) => cell(words[part], size(row[part]), "number")));
  return line;
}

function attemptRow(each) {
  const row = el("tr");
  const state = states[each.state] ?? states.unknown;
  const first = each.first_step === null ? "–" : whole(each.first_step);
  const last = each.last_step === null ? "–" : whole(each.last_step);
  row.append(el("th", String(each.number), { scope: "row", class: "number" }));
  row.append(cell(words.state, `${state.mark} ${state.name}`, state.mood), cell(words.plan, each.plan));
  const kept = each.kept_step === null ? "" : `; ${fill(words.kept, { step: whole(each.kept_step) })}`;
  row.append(cell(words.steps_made, fill(words.from_to, { first, last }) + kept));
  const cause = cell(words.cause, each.cause === null ? "–" : each.cause.sentence);
  if (each.cause !== null) cause.firstChild.append(" ", el("code", each.cause.id));
  if (each.evidence.length) {
    const more = el("details");
    more.append(el("summary", words.proof), el("pre", each.evidence.join("\n")));
    cause.firstChild.append(more);
  }
  const next = cell(words.next, each.next === null ? "–" : `${each.next.action}: ${each.next.because}`);
  if (each.changed.length) {
    const list = el("ul");
    list.append(...each.changed.map((change) => el("li", change)));
    next.firstChild.append(list);
  }
  row.append(cause, next);
  return row;
}

// --- the log -----------------------------------------------------------------------------------

const log = { name: null, bytes: -1, at: 0, waiting: 0 };

function readLog(which, bytes) {
  if (log.name === which && log.bytes === bytes) return;
  clearTimeout(log.waiting);
  const wait = log.name === which ? Math.max(0, log.at + 2000 - Date.now()) : 0;
  log.waiting = setTimeout(() => fetchLog(which, bytes), wait);
}

async function fetchLog(which, bytes) {
  Object.assign(log, { name: which, bytes, at: Date.now() });
  try {
    const sent = await fetched(`/runs/log?${new URLSearchParams({ run: name, name: which })}`);
    if (!sent.ok || log.name !== which) return;
    const place = at("log");
    const follows = place.scrollTop + place.clientHeight >= place.scrollHeight - 8;
    put("log", await sent.text());
    if (follows) place.scrollTop = place.scrollHeight;
  } catch {
    log.bytes = -1; // asked for again with the next change
  }
}
at("log-name").addEventListener("change", () => fetchLog(at("log-name").value, -1));

// --- the stream --------------------------------------------------------------------------------

const SILENT_MS = 45_000; // the server says at least every 15 s that it is there
const LOOK_MS = 5000;
let source = null;
let again = 0;
let heard = Date.now();

/** What is wrong with the connection or the folder; null: nothing is. */
function trouble() {
  if (document.hidden) return words.paused;
  if (seen.refused) return words.refused;
  if (source === null || source.readyState !== EventSource.OPEN) return words.lost;
  return seen.trouble ? fill(words.trouble, { why: seen.trouble }) : null;
}

function going() {
  if (typeof seen.share === "number") return fill(words.reading, { share: Math.round(100 * seen.share) });
  if (seen.over) return words.over;
  if (seen.doing) return fill(words.doing, { what: seen.doing.what }) + (seen.doing.share === null ? "" : ` (${Math.round(100 * seen.doing.share)} %)`);
  return seen.quiet ? fill(words.quiet, { time: seen.quiet }) : words.live;
}

function connection() {
  const wrong = trouble();
  put("link", wrong ?? going());
  at("link").classList.toggle("cut", wrong !== null && !document.hidden);
  teller.tell(() => {
    if (document.hidden || !at("state").dataset.said) return "";
    return [`${at("state").dataset.said}.`, trouble() ?? (seen.over ? words.over : words.live), ...seen.warnings].join(" ");
  });
}

function take(event) {
  heard = Date.now();
  for (const [key, value] of Object.entries(JSON.parse(event.data))) show[key]?.(value);
  connection();
}

function listen() {
  clearTimeout(again);
  source?.close();
  heard = Date.now();
  const mine = new EventSource(`/runs/stream?${new URLSearchParams({ run: name, lang: document.documentElement.lang.slice(0, 2) })}`);
  source = mine;
  mine.onmessage = take;
  mine.addEventListener("beat", () => { heard = Date.now(); });
  mine.onopen = () => {
    seen.refused = false;
    connection();
  };
  mine.onerror = async () => {
    connection();
    if (mine.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
    seen.refused = await isRefused();
    if (mine !== source) return;
    again = setTimeout(listen, LOOK_MS);
    connection();
  };
}

// A connection that was cut without a word, as by a laptop that slept, looks like one on which nothing is said.
setInterval(() => {
  if (!document.hidden && source !== null && Date.now() - heard > SILENT_MS) {
    listen();
    connection();
  }
}, LOOK_MS);

// A page that nobody looks at holds no connection: browsers allow few of them to one server.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    clearTimeout(again);
    source?.close();
    source = null;
    connection();
  } else listen();
});
addEventListener("pagehide", () => source?.close());
addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
if (!document.hidden) listen();
