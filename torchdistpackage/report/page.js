// Draws the figures of a report with Plotly, follows light and dark, sorts and filters its tables.
"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const palette = ["#2f7ed8", "#e07b39", "#3f9b5c", "#d64550", "#8b63c9", "#b58a2a", "#2aa5a0", "#7d8793"];
const dark = matchMedia("(prefers-color-scheme: dark)");

function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function drawn(figure, box) {
  const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--line"), automargin: true };
  const data = figure.traces.map((trace) => {
    const colour = palette[(trace.colour || 0) % palette.length];
    return { ...trace, line: { width: 1.5, color: colour, ...trace.line }, marker: { color: colour, ...trace.marker } };
  });
  const narrow = box.clientWidth < 480;
  const layout = {
    height: 320, margin: { l: 48, r: 12, t: 30, b: 48 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: style("--ink"), size: narrow ? 11 : 12 }, hovermode: "closest",
    showlegend: data.length > 1, legend: { orientation: "h", yanchor: "top", y: -0.32 }, ...figure.layout,
    xaxis: { ...axis, ...figure.layout.xaxis }, yaxis: { ...axis, ...figure.layout.yaxis },
  };
  return [data, layout];
}

function draw() {
  for (const figure of figures) {
    const box = document.getElementById(figure.key);
    Plotly.react(box, ...drawn(figure, box), { responsive: true, displaylogo: false, displayModeBar: "hover" });
  }
  document.documentElement.dataset.drawn = String(figures.length);
}

function sortTable(table, column, button) {
  const body = table.tBodies[0];
  const up = button.getAttribute("aria-sort") !== "ascending";
  for (const other of table.querySelectorAll("th button")) other.removeAttribute("aria-sort");
  button.setAttribute("aria-sort", up ? "ascending" : "descending");
  const text = (row) => row.cells[column].textContent;
  const rows = [...body.rows].sort((a, b) => text(a).localeCompare(text(b), undefined, { numeric: true }));
  body.append(...(up ? rows : rows.reverse()));
}

for (const table of document.querySelectorAll("table")) {
  table.querySelectorAll("th button").forEach((button, column) => {
    button.addEventListener("click", () => sortTable(table, column, button));
  });
}
for (const input of document.querySelectorAll("input[data-table]")) {
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    for (const row of document.getElementById(input.dataset.table).tBodies[0].rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
    }
  });
}
dark.addEventListener("change", draw);
draw();
