// What the live pages share: elements stay where they are while what they say changes, so that whoever reads one with a
// screen reader, has selected its text or stands on it with the keyboard keeps the place.

export function el(kind, text, attributes = {}) {
  const made = document.createElement(kind);
  if (text !== null && text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function put(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

/** The children of `place` come to say what these say. */
export function become(place, fresh) {
  const old = [...place.childNodes];
  fresh.forEach((node, number) => (old[number] ? turn(old[number], node) : place.append(node)));
  for (const node of old.slice(fresh.length)) node.remove();
}

function turn(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return undefined;
  }
  for (const { name, value } of [...fresh.attributes]) {
    // The policy lets a script set a style, but not write one as an attribute.
    if (name === "style") old.style.cssText = fresh.style.cssText;
    else if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  return become(old, [...fresh.childNodes]);
}

const madeFrom = new WeakMap();

/** A child for each value, in their order. What was there before stays the same element, wherever it stands now. */
export function slide(place, values, make) {
  const seen = new Map();
  const keys = values.map((value) => {
    const text = JSON.stringify(value);
    seen.set(text, (seen.get(text) ?? 0) + 1);
    return `${seen.get(text)} ${text}`;
  });
  const wanted = new Set(keys);
  const kept = new Map();
  for (const child of [...place.children]) {
    const key = madeFrom.get(child);
    if (wanted.has(key)) kept.set(key, child);
    else child.remove();
  }
  let next = place.firstElementChild;
  keys.forEach((key, number) => {
    const node = kept.get(key) ?? make(values[number]);
    madeFrom.set(node, key);
    if (node === next) next = next.nextElementSibling;
    else place.insertBefore(node, next);
  });
}

const two = (number) => String(number).padStart(2, "0");

/** A moment in this browser's time, as everything on these pages that has one: `2026-02-03 04:05:06`. */
export function when(moment) {
  const at = new Date(moment);
  const day = [at.getFullYear(), two(at.getMonth() + 1), two(at.getDate())].join("-");
  return `${day} ${[at.getHours(), at.getMinutes(), at.getSeconds()].map(two).join(":")}`;
}

/** What the server has written in universal time. */
export function localise(place) {
  for (const each of place.querySelectorAll("time[datetime]")) put(each, when(each.dateTime).slice(0, 16));
}

/** `Europe/Berlin, UTC+01:00` */
export function zone() {
  const minutes = -new Date().getTimezoneOffset();
  const [hours, rest] = [Math.floor(Math.abs(minutes) / 60), Math.abs(minutes) % 60];
  return `${Intl.DateTimeFormat().resolvedOptions().timeZone}, UTC${minutes < 0 ? "-" : "+"}${two(hours)}:${two(rest)}`;
}

const CALM_MS = 1500;

/** Says to screen readers what matters, once: not again when only a figure in it has changed, and not what is over before
 *  it could be said. */
export class Teller {
  constructor(place) {
    this.place = place;
    this.waiting = 0;
    this.last = "";
  }

  tell(said) {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => {
      const text = said();
      const gist = text.replace(/[\d.,]+/g, "");
      if (text && gist !== this.last) this.place.textContent = text;
      if (text) this.last = gist;
    }, CALM_MS);
  }
}

const PATIENCE_MS = 20_000;

/** As fetch, but not for ever: a connection that a sleeping laptop has lost answers never. */
export function fetched(path, options = {}) {
  return fetch(path, { signal: AbortSignal.timeout(PATIENCE_MS), ...options });
}

/** Whether this page's token is refused: the server was started again since. */
export async function isRefused() {
  try {
    return (await fetched("/static/icon.svg", { method: "HEAD", cache: "no-store" })).status === 403;
  } catch {
    return false;
  }
}
