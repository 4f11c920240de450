// One run, live.

import { listenForAlerts } from "/static/alerts.js";
import { Curves, MARKS, emptyRun, fill, lossWords, size, takePoints, whole } from "/static/curves.js";
import { Teller, become, el, fetched, put as write, slide, when } from "/static/parts.js";
import { Stream } from "/static/stream.js";

const { run: words, states, phase_names: phaseNames } = JSON.parse(document.getElementById("words").textContent);
const name = document.getElementById("run").dataset.run;
const EXPLAIN_MS = 120_000; // a log may be long
const at = (id) => document.getElementById(id);

// What has no Chinese form is English.
const tongue = (text) => (/[\u4e00-\u9fff]/.test(text) ? {} : { lang: "en" });

const run = emptyRun(name);
const curves = new Curves(words, [run], phaseNames);
const draw = () => curves.draw();
const seen = { over: false, warnings: [] };
const title = document.title;
const teller = new Teller(at("said"));

const put = (id, text) => write(at(id), text);

// --- sections ----------------------------------------------------------------------------------

const show = {
  series(change) {
    takePoints(run, change);
    draw();
  },

  evaluations(evaluations) {
    run.evaluations = evaluations;
    draw();
  },

  marks(marks) {
    run.marks = marks;
    slide(at("marks"), marks.map((mark, number) => ({ ...mark, number })), (mark) => {
      const line = el("li", null, { class: { rescue: "warn", stop: "bad" }[mark.kind] ?? "" });
      line.append(el("span", `${MARKS[mark.kind]}${mark.number + 1} `, { class: "mark" }), el("b", fill(words.mark[mark.kind], { step: whole(mark.step) })), " ");
      line.append(el("span", mark.text, tongue(mark.text)));
      return line;
    });
    at("marks").hidden = marks.length === 0;
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
    const ranks = head.ranks === null ? "" : `, ${head.ranks === 1 ? words.rank : fill(words.ranks, { count: head.ranks })}`;
    put("f-model", head.model === null ? "–" : `${head.model}, ${head.how}${ranks}`);
    put("f-attempt", head.attempt === null ? "–" : String(head.attempt));
    put("command", head.command ? `${words.command} ${head.command}` : "");
    run.pace = head.planned_tokens_per_s;
    seen.doing = head.doing;
    seen.quiet = head.quiet;
    if (["failed", "gone"].includes(head.state)) explain(`${head.state} ${head.ended}`);
    else at("failure").hidden = true;
    seen.over = !["running", "elsewhere", "unknown"].includes(head.state);
    if (at("control")) { // only with `tightfit ui --control`
      at("stop").hidden = seen.over;
      at("resume").hidden = !seen.over || head.state === "done";
    }
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
    run.memory = memory;
    const rows = [...memory.rows];
    if (memory.host) rows.push({ name: words.host_ram, now: memory.host.used, peak: null, planned: null, total: memory.host.total });
    become(at("memory"), rows.map(memoryRow));
    at("no-memory").hidden = rows.length > 0;
    at("phases").hidden = memory.phases.length === 0;
    become(at("phases").tBodies[0], memory.phases.map((phase) => {
      const row = el("tr");
      row.append(el("th", phaseNames[phase.name] ?? phase.name, { scope: "row" }));
      row.append(el("td", size(phase.planned), { class: "number" }), el("td", size(phase.measured), { class: "number" }));
      return row;
    }));
    draw();
  },

  lights({ lights, warnings, pace }) {
    put("f-share", pace === null ? "" : fill(words.of_plan, { share: Math.round(100 * pace.share) }));
    at("f-share").className = pace?.is_slow ? "share bad" : "share";
    const marks = { green: "✓", yellow: "!", red: "✗", unknown: "?" };
    const moods = { green: "good", yellow: "warn", red: "bad", unknown: "quiet" };
    become(at("lights"), lights.map((light) => {
      const line = el("li", null, { class: moods[light.colour] });
      line.append(el("span", marks[light.colour], { class: "mark", "aria-hidden": "true" }));
      line.append(el("span", `${words.colour[light.colour]}: `, { class: "hidden-text" }));
      line.append(el("span", light.title, tongue(light.title)));
      if (light.text) line.append(words.colon, el("span", light.text, tongue(light.text)));
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
      row.append(cell(words.written, each.written === null ? "–" : when(each.written)));
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
      if (event.at !== null) line.append(el("time", when(event.at * 1000).slice(5), { datetime: new Date(event.at * 1000).toISOString() }));
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
    choice.parentElement.hidden = names.length === 0;
    at("no-log").hidden = names.length > 0;
    at("log").hidden = names.length === 0;
    const log = logs.find((each) => each.name === choice.value);
    if (log) readLog(log.name, log.bytes);
  },
};

/** Why it failed, asked once for each end. */
async function explain(end) {
  if (seen.explained === end) return;
  seen.explained = end;
  try {
    const sent = await fetched(`/runs/failure?${new URLSearchParams({ run: name })}`, { signal: AbortSignal.timeout(EXPLAIN_MS) });
    if (!sent.ok) throw new Error(sent.status);
    at("failure").innerHTML = await sent.text(); // made by our templates
    at("failure").hidden = false;
    const log = `logs/rank-${at("failure").firstElementChild.dataset.rank}.log`; // of the rank that fell first
    if ([...at("log-name").options].some((option) => option.value === log)) {
      at("log-name").value = log;
      fetchLog(log, -1);
    }
  } catch {
    seen.explained = null; // asked again with the next word of the run
  }
}

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

/** What is wrong with the connection or the folder; null: nothing is. */
function trouble() {
  if (document.hidden) return words.paused;
  if (stream.refused) return words.refused;
  if (!stream.isOpen) return words.lost;
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

const stream = new Stream([name], (_, sections) => {
  for (const [key, value] of Object.entries(sections)) show[key]?.(value);
  connection();
}, connection);
listenForAlerts();
