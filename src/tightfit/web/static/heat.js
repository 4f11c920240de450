// The map by keyboard: it is one stop of the Tab key, and the arrows move within it. Without this script every cell is a
// link of its own.

function stopAt(table, cell) {
  for (const each of table.querySelectorAll(".cell")) each.tabIndex = each === cell ? 0 : -1;
}

/** Where Tab leads to. */
export function stopOf(map) {
  return map.querySelector('.cell[tabindex="0"]');
}

/** For a map that has just been drawn. */
export function steer(map) {
  const table = map.querySelector(".heat");
  if (!table) return;
  table.setAttribute("role", "grid");
  const focused = table.contains(document.activeElement) ? document.activeElement : null;
  stopAt(table, focused ?? table.querySelector(".cell[aria-current]") ?? table.querySelector(".cell"));
  map.querySelector(".heat-keys").hidden = false;
}

const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function target(rows, row, column, { key, ctrlKey }) {
  const last = rows.length - 1;
  if (key === "Home") return rows[ctrlKey ? 0 : row][0];
  if (key === "End") return rows[ctrlKey ? last : row].at(-1);
  if (!MOVES[key]) return null;
  const [down, right] = MOVES[key];
  return rows[Math.min(last, Math.max(0, row + down))][Math.min(rows[0].length - 1, Math.max(0, column + right))];
}

/** Once for the place that maps are drawn into. */
export function listen(map) {
  map.addEventListener("focusin", (event) => {
    const cell = event.target.closest(".cell");
    if (cell) stopAt(cell.closest("table"), cell);
  });
  map.addEventListener("keydown", (event) => {
    const cell = event.target.closest(".cell");
    if (!cell || event.altKey || event.metaKey) return;
    const rows = [...cell.closest("tbody").rows].map((row) => [...row.querySelectorAll(".cell")]);
    const row = rows.findIndex((cells) => cells.includes(cell));
    const next = target(rows, row, rows[row].indexOf(cell), event);
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
}
