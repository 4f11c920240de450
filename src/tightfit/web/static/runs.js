// The list of runs: asked for again while somebody looks, and put in place only where it has changed.

import { become, fetched, put } from "/static/parts.js";

const place = document.getElementById("table");
const said = document.getElementById("said");
const link = document.getElementById("link");
const words = JSON.parse(document.getElementById("words").textContent);
const EVERY_MS = 3000;
const FAILURES = 2; // one may be chance
let shown = null;
let failures = 0;

function fresh(text) {
  const made = document.createElement("template");
  made.innerHTML = text; // made by our templates
  const before = place.querySelectorAll("tbody tr").length;
  const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  become(place, [...made.content.childNodes]);
  // The same run may stand in another line now.
  [...place.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused)?.focus();
  if (place.querySelectorAll("tbody tr").length !== before) said.textContent = words.fresh;
}

async function refresh() {
  if (document.hidden) return;
  let wrong = words.lost;
  try {
    const sent = await fetched("/runs/table");
    if (sent.status === 403) wrong = words.refused;
    if (!sent.ok) throw new Error(wrong);
    const text = await sent.text();
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

async function forever() {
  await refresh();
  setTimeout(forever, EVERY_MS);
}
document.addEventListener("visibilitychange", refresh);
forever();
