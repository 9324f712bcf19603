"use strict";
// Everything that moves: the axis of the charts, the models that they show, tables that sort, and pages of models.

function drawOver(axis) {
  for (const figure of document.querySelectorAll("figure")) {
    const drawings = [...figure.querySelectorAll("[data-axis]")];
    if (!drawings.some((drawing) => drawing.dataset.axis === axis)) continue;  // charts over lengths and rates
    for (const drawing of drawings) drawing.hidden = drawing.dataset.axis !== axis;
  }
}

function showModel(number, visible) {
  for (const group of document.querySelectorAll(`.model-${number}`)) group.classList.toggle("hidden", !visible);
}

function compareCells(one, other) {
  const [a, b] = [one, other].map((cell) => cell.dataset.value);
  if (a !== undefined && b !== undefined) return a - b;
  return one.textContent.localeCompare(other.textContent, undefined, {numeric: true});
}

function sortBy(button) {
  const head = button.closest("th");
  const place = head.cellIndex, body = head.closest("table").tBodies[0];
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  for (const each of head.parentNode.cells) each.ariaSort = null;
  head.ariaSort = sign > 0 ? "ascending" : "descending";
  const empty = (row) => row.cells[place].textContent === "";
  const rows = [...body.rows].sort((a, b) => empty(a) - empty(b) || sign * compareCells(a.cells[place], b.cells[place]));
  body.append(...rows);
}

async function linkModels() {
  const bytes = Uint8Array.from(atob(document.getElementById("model-pages").textContent), (letter) => letter.charCodeAt(0));
  const pages = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  for (const link of document.querySelectorAll("a.model")) {
    link.href = URL.createObjectURL(new Blob([pages[link.dataset.number]], {type: "text/html"}));
  }
  document.body.dataset.drawn = pages.length;
}

for (const button of document.querySelectorAll(".sortable th button")) button.addEventListener("click", () => sortBy(button));
for (const input of document.querySelectorAll("input[name=axis]")) input.addEventListener("change", () => drawOver(input.value));
for (const input of document.querySelectorAll("input[name=model]")) input.addEventListener("change", () => showModel(input.value, input.checked));
linkModels();
