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
