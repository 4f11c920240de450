// Boxes that search: an input with a list becomes a combobox, of which every word that is typed must be found in a
// line's name or in what stands beside it (its size, its family). Without this script the browser's own list serves.

const MOST = 60; // lines; whoever wants others types on

function lineOf(option, id) {
  const line = document.createElement("li");
  line.id = id;
  line.setAttribute("role", "option");
  line.dataset.value = option.value;
  const name = document.createElement("span");
  name.textContent = option.value;
  line.append(name);
  if (option.label && option.label !== option.value) {
    const about = document.createElement("span");
    about.className = "quiet";
    about.textContent = option.label;
    line.append(about);
  }
  return line;
}

function bare(text) {
  return text.toLowerCase().replace(/[\s_-]+/g, "");
}

/** Of one input. `words`: what is said where nothing is found. */
export function makeCombo(input, words) {
  const options = [...input.list.options].map(({ value, label }) => ({ value, label, key: bare(`${value} ${label}`) }));
  const list = document.createElement("ul");
  const none = document.createElement("p");
  list.id = `${input.id}-options`;
  list.className = "combo-list";
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", document.querySelector(`label[for="${input.id}"]`).textContent);
  list.hidden = true;
  none.className = "combo-list combo-none quiet";
  none.textContent = words.none_found;
  none.hidden = true;
  const box = document.createElement("div");
  box.className = "combo";
  input.replaceWith(box);
  box.append(input, list, none);
  input.removeAttribute("list");
  const given = { role: "combobox", "aria-autocomplete": "list", "aria-expanded": "false", "aria-controls": list.id };
  for (const [name, value] of Object.entries(given)) input.setAttribute(name, value);
  let at = -1;
  let before = input.value;

  const isOpen = () => !list.hidden;
  const lines = () => [...list.children];

  function point(place) {
    const all = lines();
    at = all.length ? (place + all.length) % all.length : -1;
    for (const [number, line] of all.entries()) line.setAttribute("aria-selected", number === at ? "true" : "false");
    if (at < 0) input.removeAttribute("aria-activedescendant");
    else {
      input.setAttribute("aria-activedescendant", all[at].id);
      all[at].scrollIntoView({ block: "nearest" });
    }
  }

  function close() {
    list.hidden = true;
    none.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
    at = -1;
  }

  function open(text) {
    const wanted = text.toLowerCase().split(/\s+/).map(bare).filter(Boolean);
    const found = options.filter(({ key }) => wanted.every((word) => key.includes(word))).slice(0, MOST);
    list.replaceChildren(...found.map((option, number) => lineOf(option, `${list.id}-${number}`)));
    list.hidden = !found.length;
    none.hidden = Boolean(found.length) || input.dataset.none !== "say";
    input.setAttribute("aria-expanded", String(isOpen()));
    at = -1;
    input.removeAttribute("aria-activedescendant");
  }

  function take(value) {
    input.value = value;
    before = value;
    close();
    input.dispatchEvent(new Event("change", { bubbles: true }));
  }

  input.addEventListener("focus", () => { before = input.value; });
  input.addEventListener("click", () => {
    if (isOpen()) return;
    input.select();
    open("");
  });
  input.addEventListener("input", () => open(input.value));
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (!isOpen()) open(input.value === before ? "" : input.value);
      point(event.key === "ArrowDown" ? at + 1 : at < 0 ? -1 : at - 1);
    } else if (event.key === "Enter" && isOpen() && at >= 0) {
      event.preventDefault();
      take(lines()[at].dataset.value);
    } else if (event.key === "Escape" && (isOpen() || !none.hidden)) {
      event.preventDefault();
      event.stopPropagation();
      input.value = before;
      close();
    } else if (event.key === "Enter") {
      close();
    }
  });
  list.addEventListener("pointerdown", (event) => event.preventDefault()); // the focus stays in the box
  list.addEventListener("click", (event) => {
    const line = event.target.closest("[role=option]");
    if (line) take(line.dataset.value);
  });
}
