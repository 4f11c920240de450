// Alerts of the browser when a run fails, falls silent or ends. Off until somebody turns them on; then every page of
// runs looks now and then, also one that is not looked at itself.

import { fetched, put } from "/static/parts.js";

const KEY = "tightfit-alerts";
const EVERY_MS = 15_000;
const RUNNING = ["running", "elsewhere"];

export function listenForAlerts() {
  const button = document.getElementById("alerts");
  const { states, alerts: words } = JSON.parse(document.getElementById("alert-words").textContent);
  if (!("Notification" in window)) return;
  const known = new Map(); // how each run was at the last look

  const isOn = () => localStorage.getItem(KEY) === "on" && Notification.permission === "granted";

  function show() {
    button.hidden = false;
    button.setAttribute("aria-pressed", String(isOn()));
    put(button, isOn() ? words.on : words.off);
  }

  /** A page that shows the same run twice, or two pages, say it once: what has the same tag takes the other's place. */
  function tell(run, body) {
    const made = new Notification(run.name, { body, tag: `${run.run} ${run.state} ${run.stalled}`, icon: "/static/icon.svg" });
    made.onclick = () => {
      window.focus();
      location.assign(`/runs/view?${new URLSearchParams({ run: run.run })}`);
    };
  }

  async function look() {
    if (!isOn()) return known.clear();
    let runs = [];
    try {
      const sent = await fetched("/runs/news");
      if (!sent.ok) return undefined;
      runs = await sent.json();
    } catch {
      return undefined;
    }
    const first = known.size === 0;
    for (const run of runs) {
      const before = known.get(run.run);
      known.set(run.run, run);
      if (first || !before) continue;
      if (RUNNING.includes(before.state) && !RUNNING.includes(run.state)) {
        tell(run, `${["failed", "gone"].includes(run.state) ? words.failed : words.ended} (${states[run.state].name})`);
      } else if (run.stalled && !before.stalled) tell(run, words.stalled);
    }
    return undefined;
  }

  button.addEventListener("click", async () => {
    const wanted = !isOn();
    if (wanted && (await Notification.requestPermission()) !== "granted") {
      put(button, words.denied);
      return;
    }
    localStorage.setItem(KEY, wanted ? "on" : "off");
    show();
    if (wanted) new Notification("tightfit", { body: words.welcome, tag: "welcome", icon: "/static/icon.svg" });
    look();
  });
  show();
  look();
  setInterval(look, EVERY_MS);
}
