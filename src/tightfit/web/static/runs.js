// The list of runs: asked for again while somebody looks, and put in place only where it has changed.

const place = document.getElementById("table");
const said = document.getElementById("said");
const words = JSON.parse(document.getElementById("words").textContent);
let shown = null;

async function refresh() {
  if (document.hidden) return;
  try {
    const sent = await fetch("/runs/table");
    if (!sent.ok) return;
    const text = await sent.text();
    if (shown !== null && text !== shown) {
      const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      const before = place.querySelectorAll("tbody tr").length;
      place.innerHTML = text; // made by our templates
      if (focused) place.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
      if (place.querySelectorAll("tbody tr").length !== before) said.textContent = words.fresh;
    }
    shown = text;
  } catch {
    // The server has ended or is busy: what was seen last stays.
  }
}

async function forever() {
  await refresh();
  setTimeout(forever, 3000);
}
document.addEventListener("visibilitychange", refresh);
forever();
