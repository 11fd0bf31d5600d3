"use strict";
// Tables that sort by a click on a heading, and the value of the cell under the pointer. Nothing is loaded from anywhere.
document.documentElement.classList.add("live");

const number = cell => {
  const found = (cell.dataset.value ?? cell.textContent).replace(/−/g, "-").match(/-?\d[\d.,]*(e[+-]?\d+)?/i);
  return found ? parseFloat(found[0].replace(/,/g, "")) : NaN;
};
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], first = [...body.rows];
  for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const way = { null: "descending", descending: "ascending", ascending: null }[head.getAttribute("aria-sort")];
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (way) head.setAttribute("aria-sort", way);
      const sign = way === "ascending" ? 1 : -1, rows = [...first];
      if (way) rows.sort((a, b) => {
        const [x, y] = [a.cells[column], b.cells[column]], [p, q] = [number(x), number(y)];
        if (column === 0) return -sign * x.textContent.trim().localeCompare(y.textContent.trim());
        return isNaN(p) || isNaN(q) ? isNaN(p) - isNaN(q) : sign * (p - q);
      });
      body.append(...rows);
    });
  }
}

const cells = document.getElementById("cells");
if (cells) {
  const { left, top, width, height, rows, columns, values } = JSON.parse(cells.textContent);
  const chart = document.querySelector("#chart-weights .wide svg"), tip = document.createElement("p");
  tip.className = "tip";
  tip.hidden = true;
  chart.parentNode.append(tip);
  chart.addEventListener("pointermove", event => {
    const box = chart.getBoundingClientRect(), scale = chart.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const row = Math.floor((y - top) / height), column = Math.floor((x - left) / width);
    tip.hidden = !(row in rows && column in columns);
    if (tip.hidden) return;
    tip.textContent = `${rows[row]}, ${columns[column]}: ${values[row][column].toFixed(3).replace("-", "−")}`;
    tip.style.left = `${Math.min(event.clientX - box.left + 12, box.width - tip.offsetWidth)}px`;
    tip.style.top = `${event.clientY - box.top + 16}px`;
  });
  chart.addEventListener("pointerleave", () => { tip.hidden = true; });
}
