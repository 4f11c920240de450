// The map of model size × sequence length. It is asked for when it comes into sight, and again while the server still
// computes it; what is known by then is shown.

import { listen, steer, stopOf } from "/static/heat.js";

const AGAIN_MS = 900;
const section = document.getElementById("frontier");
const map = document.getElementById("frontier-map");
let asked = null;
let inSight = false;
let wanted = "";
let shown = "";

async function draw() {
  asked?.abort();
  const mine = new AbortController();
  asked = mine;
  const query = wanted;
  try {
    for (let whole = false; !whole && inSight; ) {
      const sent = await fetch(`/plan/frontier?${query}`, { signal: mine.signal });
      if (!sent.ok) return;
      put(await sent.text());
      whole = map.querySelector("[data-whole]")?.dataset.whole === "1";
      if (whole) shown = query;
      else await new Promise((resolve) => { setTimeout(resolve, AGAIN_MS); });
      if (mine.signal.aborted) return;
    }
  } catch {
    // Somebody has asked something else, or the server is gone, which the answer itself says.
  }
}

function put(html) {
  const focused = map.contains(document.activeElement) ? document.activeElement.id : "";
  map.innerHTML = html; // made by our templates, in which what was typed is text alone
  steer(map);
  if (focused) (document.getElementById(focused) ?? stopOf(map))?.focus();
}

/** For this question, from now on: an address's query. */
export function frontierFor(query) {
  wanted = query;
  if (inSight && wanted !== shown) draw();
}

/** While something else is being asked: that comes first. */
export function pauseFrontier() {
  asked?.abort();
}

section.hidden = false;
listen(map);
new IntersectionObserver((entries) => {
  inSight = entries.at(-1).isIntersecting;
  if (inSight && wanted && wanted !== shown) draw();
}, { rootMargin: "200px" }).observe(section);
