"use strict";
// Search: modules with a hit in their path or their tables stay, and are opened.
const search = document.getElementById("search");
function show(matches) {
  let hits = 0;
  for (const module of [...document.querySelectorAll("details.module")].reverse()) {
    const rows = [...module.querySelectorAll(":scope > .scroll tbody tr")];
    const named = matches(module.dataset.text);
    let own = 0;
    for (const row of rows) {
      row.hidden = !(named || matches(row.textContent));
      own += row.hidden ? 0 : 1;
    }
    const inner = module.querySelector(":scope > details.module:not([hidden])") !== null;
    module.hidden = !named && own === 0 && !inner;
    hits += own;
  }
  return hits;
}
search.addEventListener("input", () => {
  const text = search.value.trim().toLowerCase();
  const status = document.getElementById("hits");
  if (text === "") {
    show(() => true);
    status.textContent = "";
    return;
  }
  let hits = show((where) => where.toLowerCase().includes(text));
  let remark = "";
  if (hits === 0 && /\d/.test(text)) {  // the first copy of a repeated block stands for all
    const numberless = text.replace(/\d+/g, "#");
    hits = show((where) => where.toLowerCase().replace(/\d+/g, "#").includes(numberless));
    remark = ", of the copies that are shown";
  }
  for (const module of document.querySelectorAll("details.module:not([hidden])")) module.open = true;
  status.textContent = `${hits} rows${remark}`;
});
// Memory: the chart shows the curve of the rank that is chosen.
const rank = document.getElementById("rank");
if (rank !== null) {
  rank.addEventListener("change", () => {
    for (const charts of Bokeh.documents) {
      const shown = charts.get_model_by_name("memory");
      if (shown) shown.data = shown.tags[Number(rank.value)].data;
    }
  });
}
// Source: the lines of the opened module are marked in every program and scrolled to.
const programs = [...document.querySelectorAll("details.program pre")];
function mark(path) {
  const copies = path.search(/\{\d+\.\.\d+\}$/);  // a block: the comment beside its class has its path
  const below = path.split(/\.\d+\.|\}\./).pop();  // inside of a block: its path from there
  const texts = copies >= 0 ? [`# ${path.slice(0, copies)}`] : [`${below}.`, `${below.split(".").slice(-2).join(".")}.`, `${below.split(".").pop()}.`];
  for (const program of programs) {
    const lines = [...program.children];
    const text = texts.find((each) => lines.some((line) => line.textContent.includes(each)));
    for (const line of lines) line.classList.toggle("hit", text !== undefined && line.textContent.includes(text));
    const first = program.querySelector(".hit");
    if (first) program.scrollTop = first.offsetTop - program.offsetTop - 40;
  }
}
if (programs.length > 0) {
  document.getElementById("model").addEventListener("click", (event) => {
    const summary = event.target.closest("details.module > summary");
    if (summary && !summary.parentElement.open && summary.parentElement.dataset.text) mark(summary.parentElement.dataset.text);
  });
}
