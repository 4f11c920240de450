// The Diagnose view: sends a log as it is and shows the verdict that comes back as HTML from our own templates.

const form = document.getElementById("diagnose");
const field = document.getElementById("log");
const picker = document.getElementById("file");
const answer = document.getElementById("answer");
const said = document.getElementById("said");
const words = JSON.parse(document.getElementById("words").textContent);
const most = Number(form.dataset.most);
let asked = null;

function say(text, kind) {
  const line = document.createElement("p");
  line.className = `notice ${kind}`;
  line.textContent = text;
  if (kind === "bad") line.setAttribute("role", "alert");
  else said.textContent = text;
  answer.removeAttribute("aria-labelledby");
  answer.setAttribute("aria-label", words.answer);
  answer.replaceChildren(line);
}

async function ask(body, name) {
  if (body.size === 0) return say(words.empty, "bad");
  if (body.size > most) return say(words.too_long.replace("{mib}", Math.floor(most / 1048576)), "bad");
  asked?.abort();
  asked = new AbortController();
  answer.setAttribute("aria-busy", "true");
  say(name ? words.reading_file.replace("{name}", name) : words.reading, "");
  try {
    const sent = await fetch("/diagnose/answer", {
      method: "POST", body, signal: asked.signal, headers: { "Content-Type": "text/plain" },
    });
    const text = await sent.text();
    if (!sent.ok) return say(text.trim(), "bad");
    answer.innerHTML = text; // made by our templates, in which a log is text alone
    answer.setAttribute("aria-labelledby", "verdict-title"); // so that the verdict is read out as the focus comes
    answer.removeAttribute("aria-label");
    answer.focus();
  } catch (error) {
    if (error.name !== "AbortError") say(words.unreachable, "bad");
  } finally {
    answer.removeAttribute("aria-busy");
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  ask(new Blob([field.value]), null);
});
picker.addEventListener("change", () => {
  if (picker.files.length) ask(picker.files[0], picker.files[0].name);
  picker.value = "";
});
document.getElementById("clear").addEventListener("click", () => {
  asked?.abort();
  field.value = "";
  answer.replaceChildren();
  field.focus();
});
field.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
for (const name of ["dragover", "dragenter"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    form.classList.add("dropping");
  });
}
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) form.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  form.classList.remove("dropping");
  const file = event.dataTransfer.files[0];
  const text = event.dataTransfer.getData("text");
  if (file) ask(file, file.name);
  else if (text) {
    field.value = text;
    ask(new Blob([text]), null);
  }
});
