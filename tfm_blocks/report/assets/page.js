"use strict";
// Everything that moves: charts in the colours of the page, what they are drawn over, and tables that sort.

function models(type) {
  return Bokeh.documents.flatMap((one) => [...one.all_models]).filter((model) => model.type === type);
}

function paint() {
  const style = getComputedStyle(document.documentElement);
  const [ink, line] = ["--ink", "--line"].map((name) => style.getPropertyValue(name).trim());
  for (const axis of [...models("LinearAxis"), ...models("LogAxis")]) {
    axis.setv({axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: line});
  }
  for (const grid of models("Grid")) grid.setv({grid_line_color: line});
}

function drawOver(name) {
  for (const figure of models("Figure")) {
    const drawn = figure.renderers.filter((renderer) => name in renderer.data_source.data);
    for (const renderer of drawn) renderer.glyph.x = {field: name};
    if (drawn.length) figure.below[0].axis_label = name;  // charts over lengths and rates keep their axis
  }
}

function showModel(name, visible) {
  for (const renderer of models("GlyphRenderer").filter((one) => one.name === name)) renderer.visible = visible;
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

function linkModels() {
  const pages = JSON.parse(document.getElementById("model-pages").textContent);
  for (const link of document.querySelectorAll("a.model")) {
    link.href = URL.createObjectURL(new Blob([pages[link.dataset.number]], {type: "text/html"}));
  }
}

async function draw() {
  const items = JSON.parse(document.getElementById("chart-data").textContent);
  for (const [place, item] of items.entries()) await Bokeh.embed.embed_item(item, `chart-${place}`);
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  document.body.dataset.drawn = items.length;
}

for (const button of document.querySelectorAll(".sortable th button")) button.addEventListener("click", () => sortBy(button));
for (const input of document.querySelectorAll("input[name=axis]")) input.addEventListener("change", () => drawOver(input.value));
for (const input of document.querySelectorAll("input[name=model]")) input.addEventListener("change", () => showModel(input.value, input.checked));
linkModels();
draw();
