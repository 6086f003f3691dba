"use strict";
// Charts follow the theme of the page: their text is drawn, so style sheets do not reach it.
function darkNow() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
function paintCharts() {
  const text = darkNow() ? "#c9cfd6" : "#333a42";
  for (const view of Bokeh.documents) {
    for (const model of view._all_models.values()) {
      for (const name of ["axis_label_text_color", "major_label_text_color", "label_text_color", "axis_line_color",
        "major_tick_line_color", "minor_tick_line_color"]) {
        if (name in model.properties) model[name] = text;
      }
    }
  }
}
document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = darkNow() ? "light" : "dark";
  paintCharts();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintCharts);
if (document.readyState === "complete") setTimeout(paintCharts, 0); else addEventListener("load", () => setTimeout(paintCharts, 0));
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
