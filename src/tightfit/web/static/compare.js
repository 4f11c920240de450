// Several runs over each other, live.

import { Curves, emptyRun, leastLoss, lossWords, size, takePoints, whole } from "/static/curves.js";
import { put } from "/static/parts.js";
import { Stream } from "/static/stream.js";

const { run: words, states } = JSON.parse(document.getElementById("words").textContent);
const rows = [...document.querySelectorAll("#compared tr")];
const runs = rows.map((row) => emptyRun(row.querySelector("a").textContent));
const curves = new Curves(words, runs);
const link = document.getElementById("link");

function tell(number) {
  const run = runs[number];
  const { head } = run;
  const cell = (key, text) => put(rows[number].querySelector(`[data-key=${key}]`), text);
  if (head) {
    const { name, mark, mood } = states[head.state];
    put(rows[number].querySelector(".said"), name);
    put(rows[number].querySelector(".mark"), mark);
    rows[number].querySelector(".mark").parentElement.className = mood;
    cell("step", head.step === null ? "–" : whole(head.step) + (head.steps === null ? "" : ` / ${whole(head.steps)}`));
    cell("last", lossWords(head.loss));
    cell("pace", head.tokens_per_s === null ? "–" : whole(head.tokens_per_s));
  }
  cell("lowest", lossWords(leastLoss(run)));
  cell("evaluated", lossWords(run.evaluations[run.evaluations.length - 1]?.loss));
  cell("planned", run.share ? `${Math.round(100 * run.share)} %` : "–");
  cell("peak", size(run.memory.rows?.reduce((most, row) => Math.max(most, row.peak ?? 0), 0) || null));
}

const stream = new Stream(rows.map((row) => row.dataset.run), (number, sections) => {
  const run = runs[number];
  if (sections.series) takePoints(run, sections.series);
  for (const key of ["head", "memory", "evaluations"]) run[key] = sections[key] ?? run[key];
  if (sections.lights) run.share = sections.lights.pace?.share;
  tell(number);
  curves.draw();
}, () => {
  put(link, document.hidden ? words.paused : stream.refused ? words.refused : stream.isOpen ? words.live : words.lost);
});
