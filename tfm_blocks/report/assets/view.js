"use strict";
// Figures that open and close, the facts of the selected node, the search, and newer versions of a watched file.

const data = JSON.parse(document.getElementById("data").textContent);
const details = document.getElementById("details");
const UNFOLDED = "*";
const views = [...document.querySelectorAll(".model")].map((section, number) => ({
  section, model: data.models[number], closed: new Set(), every: false,
}));
let selected = null;

function make(tag, text, parent) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function pattern(address) {
  return address.split(".").map((name) => (/^\d+$/.test(name) ? "*" : name)).join(".");
}

function foldableOf(view, address) {
  const name = pattern(address).replace(/\.\*$/, "");
  return view.model.foldable.includes(name) ? name : null;
}

function keyOf(view) {
  return view.every ? UNFOLDED : view.model.foldable.filter((name) => view.closed.has(name)).join(" ");
}

function addressesOf(group) {
  return (group.dataset.nodes || group.dataset.node).split(" ");
}

function draw(view) {
  if (!(keyOf(view) in view.model.figures)) view.closed = new Set([...view.closed].slice(-1));
  const parsed = new DOMParser().parseFromString(view.model.figures[keyOf(view)], "image/svg+xml");
  const figure = view.section.querySelector(".figure");
  figure.replaceChildren(document.adoptNode(parsed.documentElement));
  figure.classList.toggle("wide", view.every);
  for (const group of figure.querySelectorAll("[data-node]")) {
    if (!group.matches(".plate") || foldableOf(view, group.dataset.node)) {
      group.setAttribute("tabindex", "0");
      group.setAttribute("role", "button");
    }
  }
  highlight(view);
}

function highlight(view) {
  const wrong = data.problems.map((problem) => problem.address);
  for (const group of view.section.querySelectorAll("[data-node]:not(.plate)")) {
    const addresses = addressesOf(group);
    group.classList.toggle("selected", Boolean(selected) && selected.view === view && addresses.includes(selected.address));
    const paths = addresses.map((address) => recordOf(view, address)?.path).filter(Boolean);
    group.classList.toggle("wrong", paths.some((path) => wrong.some((place) => place === path || place.startsWith(path + "."))));
  }
}

function recordOf(view, address) {
  return view.model.records[view.model.nodes[address]];
}

function toggle(view, name) {
  view.every = false;
  if (!view.closed.delete(name)) view.closed.add(name);
  draw(view);
  [...view.section.querySelectorAll("[tabindex]")].find((group) => foldableOf(view, group.dataset.node) === name)?.focus();
}

function activate(view, group) {
  const address = group.dataset.node;
  if (recordOf(view, address) && !group.matches(".plate")) select(view, address);
  else if (foldableOf(view, address)) toggle(view, foldableOf(view, address));
}

function select(view, address) {
  selected = {view, address};
  if (![...view.section.querySelectorAll("[data-node]:not(.plate)")].some((group) => addressesOf(group).includes(address) && !foldableOf(view, group.dataset.node))) {
    view.closed.clear();
    draw(view);
  }
  views.forEach(highlight);
  describe(view, address);
}

function describe(view, address) {
  const record = recordOf(view, address);
  const block = data.blocks[record.block] || {formula: "", source: ""};
  details.replaceChildren();
  make("h2", views.length > 1 ? `${view.model.name}: ${address}` : address, details);
  if (record.block) make("p", record.block, details).className = "block";
  const [formula, ...paragraphs] = block.formula.split("\n\n").map((text) => text.replaceAll("\n", " "));
  if (formula) make("p", formula, details).className = "formula";
  if (paragraphs.length) {
    const more = make("details", "", details);
    make("summary", "more on this block", more);
    paragraphs.forEach((text) => make("p", text, more));
  }
  if (block.source) make("p", block.source, details).className = "hint";
  const facts = {shape: record.shape, "add & norm": record.add_norm, weights: record.weights, parameters: record.parameters.toLocaleString("en"), "multiply-adds": record.multiply_adds.toLocaleString("en")};
  const list = make("dl", "", details);
  for (const [name, text] of Object.entries(facts)) {
    if (text !== "") {
      make("dt", name, list);
      make("dd", text, list);
    }
  }
  table("reads", ["port", "from", "shape"], record.reads);
  table("arguments", ["argument", "value", "set by"], record.arguments);
  table("weights", ["weight", "role", "shape", "initial values"], record.own_weights);
  for (const [file, line, text] of record.lines) {
    make("h3", `${file}:${line}`, details);
    make("pre", text, details).className = "yaml";
  }
}

function table(title, headings, rows) {
  if (!rows.length) return;
  make("h3", title, details);
  const made = make("table", "", details);
  const head = make("tr", "", make("thead", "", made));
  headings.forEach((heading) => make("th", heading, head));
  const body = make("tbody", "", made);
  for (const row of rows) {
    const line = make("tr", "", body);
    row.forEach((text) => make("td", text, line));
  }
}

function search(text) {
  const matches = document.getElementById("matches");
  matches.replaceChildren();
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return;
  for (const view of views) {
    const seen = new Set();
    for (const [address, number] of Object.entries(view.model.nodes)) {
      const record = view.model.records[number];
      const all = [address, record.block, ...record.arguments.map((row) => `${row[0]}=${row[1]}`)].join(" ").toLowerCase();
      if (seen.has(pattern(address)) || !words.every((word) => all.includes(word))) continue;
      seen.add(pattern(address));
      const button = make("button", views.length > 1 ? `${view.model.name}: ${address}` : address, make("li", "", matches));
      button.type = "button";
      button.addEventListener("click", () => select(view, address));
    }
  }
  if (!matches.children.length) make("li", "nothing found", matches);
}

function show(problems) {
  data.problems = problems;
  const place = document.getElementById("problems");
  place.replaceChildren();
  for (const problem of problems) make("pre", problem.text, place);
  views.forEach(highlight);
}

async function poll() {
  try {
    const state = await (await fetch("/state", {cache: "no-store"})).json();
    if (state.version !== data.watch) {
      location.reload();
      return;
    }
    show(state.problems);
  } catch {
    show([{address: "", text: "the server of this page has stopped"}]);
  }
  setTimeout(poll, 200);
}

for (const view of views) {
  const {section, model} = view;
  section.querySelector(".totals").textContent = `${model.parameters.toLocaleString("en")} parameters, ${model.multiply_adds.toLocaleString("en")} multiply-adds with ${model.condition}`;
  section.querySelector(".all").hidden = !(UNFOLDED in model.figures);
  section.querySelector(".all").addEventListener("click", () => { view.every = true; draw(view); });
  section.querySelector(".open").addEventListener("click", () => { view.every = false; view.closed.clear(); draw(view); });
  section.querySelector(".close").addEventListener("click", () => { view.every = false; view.closed = new Set(model.foldable); draw(view); });
  const figure = section.querySelector(".figure");
  const groupOf = (event) => event.target.closest("[tabindex]");
  figure.addEventListener("click", (event) => groupOf(event) && activate(view, groupOf(event)));
  figure.addEventListener("keydown", (event) => {
    if ((event.key === "Enter" || event.key === " ") && groupOf(event)) {
      event.preventDefault();
      activate(view, groupOf(event));
    }
  });
  draw(view);
}
document.getElementById("search").addEventListener("input", (event) => search(event.target.value));
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target.tagName !== "INPUT") {
    event.preventDefault();
    document.getElementById("search").focus();
  }
});
show(data.problems);
if (data.watch) poll();
document.body.dataset.drawn = "true";
