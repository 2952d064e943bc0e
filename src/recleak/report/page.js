"use strict";
// Each figure holds its chart as JSON. Expressions are interpreted, never compiled: the page forbids eval.
const look = {
  font: "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif",
  aria: false,
  background: "transparent",
  padding: { left: 0, right: 8, top: 6, bottom: 0 },
  view: { stroke: null },
  axis: {
    domainColor: "var(--faint)", tickColor: "var(--faint)", gridColor: "var(--line)", labelColor: "var(--soft)",
    titleColor: "var(--soft)", titleFontWeight: "normal", titleFontSize: 12, labelFontSize: 11, labelOverlap: true,
    labelFlush: false, tickCount: 6, titlePadding: 8,
  },
};
const rowsOf = ({ columns, rows }) =>
  rows.map((row) => Object.fromEntries(columns.map((name, place) => [name, row[place]])));

async function draw(figure) {
  const place = figure.querySelector(".chart");
  try {
    const spec = JSON.parse(figure.querySelector("script").textContent);
    for (const name of Object.keys(spec.datasets)) spec.datasets[name] = rowsOf(spec.datasets[name]);
    await vegaEmbed(place, spec, {
      mode: "vega-lite", ast: true, renderer: "svg", actions: false, defaultStyle: false, config: look,
      tooltip: { disableDefaultStyle: true },
    });
  } catch (problem) {
    place.classList.add("failed");
    place.textContent = "This chart could not be drawn; its numbers are in the table below.";
    for (const table of figure.querySelectorAll("details")) table.open = true;
    console.error(problem);
  }
}

Promise.all(Array.from(document.querySelectorAll("figure.drawn"), draw)).then(() => {
  document.documentElement.dataset.charts = "done";
});
