// The Plan view: asks again as the sliders move and shows what comes back as HTML from our own templates. The state is
// the address, so that the page without this script, a link, and the back button all mean the same.

import { makeCombo } from "/static/combo.js";
import { frontierFor, pauseFrontier } from "/static/frontier.js";
import { listen as listenToKeys, steer, stopOf } from "/static/heat.js";

const form = document.getElementById("plan");
const answer = document.getElementById("answer");
const verdict = document.getElementById("verdict");
const problem = document.getElementById("problem");
const heat = document.getElementById("heat");
const heatMap = document.getElementById("heat-map");
const files = document.getElementById("files");
const filesList = document.getElementById("files-list");
const pop = document.getElementById("pop");
const said = document.getElementById("said");
const words = JSON.parse(document.getElementById("words").textContent);
const PAUSE_MS = 60;
const REST_MS = 350; // the map and the files wait until the slider rests
const SAY_MS = 700; // so does what is read out
const SEQUENCES = [128];
while (SEQUENCES.at(-1) < 131072) {
  const last = SEQUENCES.at(-1);
  SEQUENCES.push(Math.log2(last) % 1 === 0 ? last * 1.5 : (last / 1.5) * 2);
}
const SHARES = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];

let asked = null;
let pending = null; // the question of the answer that is on its way
const ahead = { asked: null, said: "", goesOn: false }; // the question that is asked before somebody does
let moved = null; // the slider that was moved last, and to which side
let guessing = false;
let guessAgain = false;
let timer = 0;
let restTimer = 0;
let sayTimer = 0;
let goesToCompared = false; // once the comparison that was asked for is there

// --- the question ---

const field = (name) => form.elements.namedItem(name);
const numberIn = (name, otherwise) => {
  const value = Number(field(name).value.trim().replace(/[_,]/g, ""));
  return Number.isFinite(value) && value > 0 ? value : otherwise;
};
const world = () => numberIn("gpus", 1) * numberIn("nodes", 1);

function query() {
  const said = new URLSearchParams();
  for (const [name, value] of new FormData(form)) {
    if (typeof value !== "string" || !value.trim()) continue;
    if (name === "model" && field("config").value.trim()) continue;
    if (name.startsWith("lora-") && !field("method").value) continue;
    if (name === "nodes" && value.trim() === "1") continue;
    said.append(name, value.trim());
  }
  return said.toString();
}

const STOPS = {
  seq: { most: () => SEQUENCES.length - 1, value: (place) => SEQUENCES[place], word: (value) => `${value}` },
  "effective-batch": {
    most: () => SHARES.length - 1,
    value: (place) => (SHARES[place] ? SHARES[place] * world() : ""),
    word: (value) => (value ? `${value}` : words.batch_auto),
  },
  gpus: { most: () => 15, value: (place) => place + 1, word: (value) => `${value}` },
};

function nearest(name) {
  const stops = STOPS[name];
  const text = field(name).value.trim();
  if (!text && name === "effective-batch") return 0;
  const now = numberIn(name, name === "seq" ? 2048 : 1);
  let best = 0;
  for (let place = 0; place <= stops.most(); place += 1) {
    const gap = Math.abs(Math.log(Number(stops.value(place)) / now));
    if (!(gap >= Math.abs(Math.log(Number(stops.value(best)) / now)))) best = place;
  }
  return best;
}

function place(slider) {
  const name = slider.dataset.for;
  slider.max = STOPS[name].most();
  slider.value = nearest(name);
  slider.setAttribute("aria-valuetext", STOPS[name].word(field(name).value.trim()));
}

function placeAll() {
  for (const slider of form.querySelectorAll("input[type=range]")) place(slider);
  document.getElementById("rank-field").hidden = !field("method").value;
  document.getElementById("config-clear").hidden = !field("config").value;
  field("model").disabled = Boolean(field("config").value.trim());
}

// A batch must be shared evenly by the GPUs: it follows their number to the nearest one that is.
function shareBatch() {
  const batch = numberIn("effective-batch", 0);
  const each = world() * numberIn("micro-batch", 1);
  if (!batch || batch % each === 0) return;
  field("effective-batch").value = Math.max(1, Math.round(batch / each)) * each;
}

// `2x8xA100` in the card's box says all three: what was written last wins over the sliders.
function takeCounts() {
  const found = /^(?:(\d{1,6})\s*[x×*]\s*)?(\d{1,6})\s*[x×*]\s*(\D.*|\d{3,}.*|\d+\s*GB.*)$/i.exec(field("card").value.trim());
  if (!found) return;
  const [, nodes, gpus, card] = found;
  field("card").value = card;
  field("gpus").value = gpus;
  if (nodes) field("nodes").value = nodes;
}

function fill(search) {
  const said = new URLSearchParams(search);
  if (![...said.keys()].some((name) => field(name))) return; // the bare address: the server's own values stand
  for (const each of form.elements) {
    if (!each.name) continue;
    if (each.type === "checkbox") each.checked = said.getAll("allow").join(",").split(",").includes(each.value);
    else each.value = said.get(each.name) ?? "";
    if (each.tagName === "SELECT" && each.selectedIndex < 0) each.selectedIndex = 0;
  }
  placeAll();
}

// --- the answer ---

function say(text, about = "") {
  const line = document.createElement("p");
  line.className = "notice bad";
  line.setAttribute("role", "alert");
  line.dataset.field = about;
  line.textContent = text;
  complain(line);
}

function describe(each, change) {
  const ids = change((each.getAttribute("aria-describedby") ?? "").split(" ").filter(Boolean));
  if (ids.length) each.setAttribute("aria-describedby", ids.join(" "));
  else each.removeAttribute("aria-describedby");
}

// The field that is wrong is marked, and says what is: on a phone the sentence above may be out of sight.
function mark(name = "", text = "") {
  for (const each of form.querySelectorAll("[aria-invalid]")) {
    each.removeAttribute("aria-invalid");
    describe(each, (ids) => ids.filter((id) => id !== "wrong"));
  }
  form.querySelector(".wrong")?.remove();
  const wrong = name ? field(name) : null;
  if (!(wrong instanceof HTMLElement)) return;
  const line = document.createElement("p");
  line.className = "wrong";
  line.id = "wrong";
  line.textContent = text;
  wrong.setAttribute("aria-invalid", "true");
  describe(wrong, (ids) => [line.id, ...ids]);
  const hidden = wrong.closest("details:not([open])");
  if (hidden) hidden.open = true;
  wrong.closest(".field, details").append(line);
}

function complain(line) {
  clearTimeout(sayTimer);
  problem.replaceChildren(line);
  mark(line.dataset.field, line.textContent);
  verdict.replaceChildren();
  for (const part of [answer, heat, files]) part.classList.add("stale");
}

function put(place, html) {
  const open = [...place.querySelectorAll("details[open]")].map((each) => each.id);
  const held = place.contains(document.activeElement);
  const focused = document.activeElement.id;
  place.innerHTML = html; // made by our templates, in which what was typed is text alone
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  if (place === heatMap) steer(heatMap);
  if (held) ((focused && document.getElementById(focused)) || stopOf(place) || verdict).focus({ preventScroll: true });
  offerCopies(place);
}

async function fetched(path, signal) {
  const sent = await fetch(path, { signal });
  if (!sent.ok) throw new Error((await sent.text()).trim());
  return sent.text();
}

async function ask() {
  asked?.abort();
  const mine = new AbortController();
  asked = mine;
  const said = query();
  pending = said;
  for (const part of [answer, heat, files]) part.setAttribute("aria-busy", "true");
  try {
    const found = show(await fetched(`/plan/answer?${said}`, mine.signal));
    if (!found) return;
    if (goesToCompared) document.getElementById("compare")?.scrollIntoView();
    goesToCompared = false;
    if (found.dataset.advised !== "1") show(await fetched(`/plan/answer?${said}&advice=1`, mine.signal));
    restTimer = setTimeout(() => rest(said, mine.signal), REST_MS);
  } catch (error) {
    if (error.name !== "AbortError") say(error instanceof TypeError ? words.unreachable : error.message);
  } finally {
    if (asked === mine) {
      answer.removeAttribute("aria-busy");
      pending = null;
    }
  }
}

// What the ways that are shown would need: they follow the slider, while every way is priced when it rests.
async function guess() {
  guessAgain = true;
  if (guessing) return;
  guessing = true;
  while (guessAgain) {
    guessAgain = false;
    await guessOnce().catch(() => {}); // the answer itself will say what is wrong
  }
  guessing = false;
}

async function guessOnce() {
  const last = answer.querySelector(".found");
  if (!last) return;
  const html = await fetched(`/plan/guess?${query()}&like=${encodeURIComponent(last.dataset.address)}`);
  const ways = answer.querySelector(".ways");
  if (answer.hasAttribute("aria-busy") && html.trim() && ways) put(ways, html);
}

function show(html) {
  const made = document.createElement("template");
  made.innerHTML = html;
  const wrong = made.content.querySelector("[data-problem]");
  if (wrong) {
    complain(wrong);
    return null;
  }
  problem.replaceChildren();
  mark();
  for (const part of [answer, heat, files]) part.classList.remove("stale");
  const card = made.content.querySelector(".card");
  card.remove();
  if (verdict.innerHTML !== card.innerHTML) verdict.replaceChildren(...card.childNodes);
  put(answer, made.innerHTML);
  const found = answer.querySelector(".found");
  clearTimeout(sayTimer);
  sayTimer = setTimeout(() => { said.textContent = found.dataset.said; }, SAY_MS);
  return found;
}

async function rest(said, signal) {
  askAhead().catch(() => {});
  frontierFor(said);
  try {
    await Promise.all([restOf("files", files, filesList, said, signal), restOf("heat", heat, heatMap, said, signal)]);
  } catch (error) {
    if (error.name !== "AbortError") heat.classList.add("stale");
  }
}

// Who moves a slider is likely to move it on: the server knows the answers of the next stops when they are asked for.
async function askAhead() {
  if (!moved) return;
  const { name, step } = moved;
  const mine = new AbortController();
  Object.assign(ahead, { asked: mine, goesOn: true });
  const at = nearest(name);
  for (const place of [at + step, at + 2 * step, at - step]) {
    if (place < 0 || place > STOPS[name].most()) continue;
    const kept = ["gpus", "seq", "effective-batch"].map((each) => [each, field(each).value]);
    field(name).value = STOPS[name].value(place);
    if (name === "gpus") shareBatch();
    ahead.said = query();
    for (const [each, value] of kept) field(each).value = value;
    await fetched(`/plan/answer?${ahead.said}`, mine.signal);
    if (!ahead.goesOn || ahead.asked !== mine) return;
  }
}

async function restOf(name, part, place, said, signal) {
  const html = await fetched(`/plan/${name}?${said}`, signal);
  part.hidden = !html.trim();
  part.removeAttribute("aria-busy");
  put(place, html);
}

// While a slider moves the address follows; the back button leads to where it stood before.
let settled = location.pathname + location.search;

function address(push) {
  const place = `/plan?${query()}`;
  if (push && place !== settled) {
    history.replaceState(null, "", settled);
    history.pushState(null, "", place);
    settled = place;
  } else {
    history.replaceState(null, "", place);
  }
  for (const link of document.querySelectorAll(".languages a")) link.href = `${place}&lang=${link.hreflang}`;
}

function later(push) {
  address(push);
  if (pending === query()) return; // a slider that is let go asks what it asked when it moved there
  pauseFrontier();
  asked?.abort();
  asked = null;
  pending = null;
  ahead.goesOn = false;
  if (ahead.said !== query()) ahead.asked?.abort(); // what is asked for now may be half known
  clearTimeout(timer);
  clearTimeout(restTimer);
  clearTimeout(sayTimer);
  said.textContent = ""; // so that the same answer to another question is read out as well
  answer.setAttribute("aria-busy", "true");
  guess();
  timer = setTimeout(ask, PAUSE_MS);
}

// --- what people do ---

form.addEventListener("input", (event) => {
  const slider = event.target;
  if (slider.type !== "range") return;
  const name = slider.dataset.for;
  moved = { name, step: Number(slider.value) < nearest(name) ? -1 : 1 };
  field(name).value = STOPS[name].value(Number(slider.value));
  slider.setAttribute("aria-valuetext", STOPS[name].word(field(name).value));
  if (name === "gpus") shareBatch();
  later(false);
});
form.addEventListener("change", async (event) => {
  const changed = event.target;
  if (changed.type === "range") return later(true);
  if (changed.name === "config" && !(await reduce())) return undefined;
  if (changed.name === "card") takeCounts();
  if (["gpus", "nodes", "card", "micro-batch"].includes(changed.name)) shareBatch();
  placeAll();
  return later(true);
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  takeCounts();
  placeAll();
  later(true);
});
document.getElementById("config-clear").addEventListener("click", () => {
  field("config").value = "";
  if (!field("model").value) field("model").value = form.dataset.model;
  placeAll();
  later(true);
});
document.getElementById("use-this")?.addEventListener("click", (event) => {
  event.preventDefault();
  field("card").value = "this";
  for (const name of ["gpus", "nodes", "host-ram", "link", "network"]) field(name).value = "";
  placeAll();
  later(true);
});
window.addEventListener("popstate", () => {
  settled = location.pathname + location.search;
  fill(location.search);
  ask();
});

// Only what decides the shape is kept of a pasted config: the rest would make the address too long.
async function reduce() {
  const text = field("config").value.trim();
  if (!text) return true;
  const most = Number(form.dataset.most);
  if (new Blob([text]).size > most) {
    say(words.too_long.replace("{kib}", Math.floor(most / 1024)));
    return false;
  }
  try {
    const sent = await fetch("/plan/config", { method: "POST", body: text, headers: { "Content-Type": "text/plain" } });
    const said = await sent.json();
    if (said.problem) say(said.problem.text, "config");
    else field("config").value = said.config;
    return !said.problem;
  } catch {
    say(words.unreachable);
    return false;
  }
}

// A config may be pasted into the model's box as well, where people look for it.
field("model").addEventListener("paste", (event) => {
  const text = event.clipboardData.getData("text").trim();
  if (!text.startsWith("{")) return;
  event.preventDefault();
  document.getElementById("paste").open = true;
  field("config").value = text;
  field("config").dispatchEvent(new Event("change", { bubbles: true }));
});

document.addEventListener("click", async (event) => {
  const target = event.target instanceof Element ? event.target : null;
  const cell = target?.closest("a.cell, a.allow, a.ask, a.compare, a.how-long, a.picture, a.copy-link");
  if (cell && !(event.ctrlKey || event.metaKey || event.shiftKey)) {
    event.preventDefault();
    if (cell.matches(".how-long")) return field("max-steps").focus();
    if (cell.matches(".picture")) return savePicture(cell.href);
    if (cell.matches(".copy-link")) return copyLink(cell);
    if (cell.matches(".compare")) compare(cell.dataset.compare);
    else if (cell.dataset.allow) allow(cell.dataset.allow);
    else if (cell.matches(".ask") || "wholeQuestion" in cell.dataset) askWhole(cell.search);
    else choose(cell.dataset);
    return later(true);
  }
  const button = target?.closest(".most");
  if (button) return most(button);
  const copier = target?.closest(".copier");
  if (copier) return copy(copier);
  const bars = target?.closest(".bars");
  if (bars) document.getElementById(bars.dataset.phases).toggleAttribute("open");
  return undefined;
});

// Not the whole of the link: the form may have moved on since the map was drawn.
function choose({ seq, micro }) {
  field("seq").value = seq;
  field("micro-batch").value = micro;
  field("accum").value = "";
  shareBatch();
  document.getElementById("more").open = true;
  placeAll();
}

// A question that a link holds as a whole; what was compared stays so.
function askWhole(search) {
  const compared = field("compare").value;
  fill(search);
  field("compare").value = compared;
  shareBatch();
  placeAll();
}

function compare(way) {
  field("compare").value = way;
  goesToCompared = Boolean(way);
}

function allow(name) {
  document.getElementById("allow-more").open = true;
  const box = form.querySelector(`input[name=allow][value="${name}"]`);
  box.checked = true;
  box.focus(); // the link that was followed is about to go
}

// The question turned round: what is the most that fits goes into the form.
async function most(button) {
  const before = query();
  if (button.hasAttribute("aria-busy")) return;
  button.setAttribute("aria-busy", "true");
  said.textContent = words.most_looking;
  try {
    const found = JSON.parse(await fetched(`/plan/most?${before}&max=${button.dataset.max}`));
    if (query() !== before) return; // something else is asked by now
    if (found.problem) {
      say(found.problem.text, found.problem.field);
      return;
    }
    for (const [name, value] of Object.entries(found.fields)) field(name).value = value;
    placeAll();
    later(true);
  } catch (error) {
    say(error instanceof TypeError ? words.unreachable : error.message);
  } finally {
    button.removeAttribute("aria-busy");
  }
}

async function copy(copier) {
  const code = copier.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    tell(copier, words.copied);
  } catch {
    getSelection().selectAllChildren(code);
    tell(copier, words.copy_failed);
  }
}

async function copyLink(link) {
  try {
    await navigator.clipboard.writeText(link.href);
    tell(link, words.copied);
  } catch {
    location.assign(link.href); // where a browser does not let us copy, the address bar has it
  }
}

function tell(button, text) {
  const before = button.textContent;
  button.textContent = text;
  setTimeout(() => { button.textContent = before; }, 2000);
}

// The server draws it; a browser alone can make pixels of it.
async function savePicture(href) {
  const image = new Image();
  image.src = href;
  try {
    await image.decode();
  } catch {
    return say(words.unreachable);
  }
  const canvas = document.createElement("canvas");
  canvas.width = 2 * image.naturalWidth;
  canvas.height = 2 * image.naturalHeight;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const made = await new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(made);
  link.download = "tightfit-plan.png";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  return undefined;
}

function offerCopies(place) {
  for (const copier of place.querySelectorAll(".copier")) copier.hidden = false;
}

// --- phases beside the pointer ---

answer.addEventListener("pointerover", (event) => {
  const bars = event.target instanceof Element ? event.target.closest(".bars") : null;
  if (!bars || event.pointerType !== "mouse") return;
  const details = document.getElementById(bars.dataset.phases);
  if (details.open) return;
  const box = details.querySelector(".phase-box .wide").cloneNode(true);
  box.removeAttribute("tabindex");
  pop.replaceChildren(box);
  pop.hidden = false;
  follow(event);
});
answer.addEventListener("pointermove", follow);
answer.addEventListener("pointerout", (event) => {
  const to = event.relatedTarget instanceof Element ? event.relatedTarget.closest(".bars") : null;
  if (!to) pop.hidden = true;
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  pop.hidden = true;
  document.getElementById("use")?.removeAttribute("open");
});

function follow(event) {
  if (pop.hidden) return;
  const size = pop.getBoundingClientRect();
  const below = event.clientY + 18 + size.height < innerHeight;
  pop.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - size.width - 8))}px`;
  pop.style.top = `${Math.max(4, below ? event.clientY + 18 : event.clientY - size.height - 12)}px`;
}

for (const each of form.querySelectorAll("input[type=range], .most")) each.hidden = false;
for (const each of form.querySelectorAll("input[list]")) makeCombo(each, words);
listenToKeys(heatMap);
steer(heatMap);
placeAll();
offerCopies(document);
if (![...new URLSearchParams(location.search).keys()].some((name) => field(name))) {
  address(false); // a bare address says what it means, to be come back to
  settled = location.pathname + location.search;
}
const wrong = problem.querySelector("[data-field]");
if (wrong) mark(wrong.dataset.field, wrong.textContent);
if (answer.querySelector(".found")) {
  frontierFor(query());
  asked = new AbortController(); // the map has come without the other ways, which take a while
  restOf("heat", heat, heatMap, query(), asked.signal).catch(() => {});
}
