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
      if (model.tags.includes("themed")) model.text_color = text;
    }
  }
}
document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = darkNow() ? "light" : "dark";
  paintCharts();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintCharts);
if (document.readyState === "complete") setTimeout(paintCharts, 0); else addEventListener("load", () => setTimeout(paintCharts, 0));
