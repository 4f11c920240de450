// The list of runs: asked for again while somebody looks, and put in place only where it has changed. What is searched,
// filtered and sorted by is in the address, and the server does it.

import { listenForAlerts } from "/static/alerts.js";
import { become, fetched, localise, put, zone } from "/static/parts.js";

const place = document.getElementById("table");
const said = document.getElementById("said");
const link = document.getElementById("link");
const filter = document.getElementById("filter");
const compare = document.getElementById("compare");
const words = JSON.parse(document.getElementById("words").textContent);
const EVERY_MS = 3000;
const SOON_MS = 150; // between two letters of a search, and where runs are still being read
const FAILURES = 2; // one may be chance
const chosen = new Set(); // runs to compare, wherever they stand in the list
let shown = null;
let failures = 0;
let waiting = 0;

function fresh(text) {
  const made = document.createElement("template");
  made.innerHTML = text; // made by our templates
  localise(made.content);
  const before = place.querySelectorAll("tbody tr").length;
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  const mark = focused?.getAttribute("href") ?? focused?.value;
  become(place, [...made.content.childNodes]);
  // The same run may stand in another line now.
  if (mark) [...place.querySelectorAll("a, input")].find((each) => (each.getAttribute("href") ?? each.value) === mark)?.focus();
  for (const box of place.querySelectorAll("input[name=run]")) box.checked = chosen.has(box.value);
  if (place.querySelectorAll("tbody tr").length !== before) said.textContent = words.fresh;
}

async function refresh() {
  if (document.hidden) return;
  let wrong = words.lost;
  const asked = location.search;
  try {
    const sent = await fetched(`/runs/table${asked}`);
    if (sent.status === 403) wrong = words.refused;
    if (!sent.ok) throw new Error(wrong);
    const text = await sent.text();
    if (asked !== location.search) return; // something else was asked for meanwhile
    if (shown !== null && text !== shown) fresh(text);
    shown = text;
    failures = 0;
  } catch {
    failures += 1; // what was seen last stays
  }
  const cut = failures < FAILURES ? "" : wrong;
  if (cut !== link.textContent) said.textContent = cut;
  put(link, cut);
  link.hidden = !cut;
}

function forever(wait = 0) {
  clearTimeout(waiting);
  waiting = setTimeout(async () => {
    await refresh();
    forever(place.querySelector("table[data-read='0']") && !failures ? SOON_MS : EVERY_MS);
  }, wait);
}

function ask() {
  const asked = new URLSearchParams([...new FormData(filter)].filter(([name, value]) => value && !(name === "sort" && value === "changed")));
  const lang = new URLSearchParams(location.search).get("lang");
  if (lang) asked.set("lang", lang);
  history.replaceState(null, "", `/runs${asked.size ? `?${asked}` : ""}`);
  shown ??= "";
  forever(SOON_MS);
}

filter.addEventListener("input", ask);
filter.addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
compare.addEventListener("change", ({ target }) => {
  if (target.checked) chosen.add(target.value);
  else chosen.delete(target.value);
});
compare.addEventListener("submit", (event) => {
  event.preventDefault();
  if (chosen.size < 2 || chosen.size > 8) {
    put(link, words.choose_two);
    link.hidden = false;
    said.textContent = words.choose_two;
  } else location.assign(`/runs/compare?${new URLSearchParams([...chosen].map((run) => ["run", run]))}`);
});
put(document.getElementById("zone"), words.zone.replace("{zone}", zone()));
localise(place);
for (const box of place.querySelectorAll("input[name=run]:checked")) chosen.add(box.value); // as the browser kept them
document.addEventListener("visibilitychange", refresh);
listenForAlerts();
forever();
