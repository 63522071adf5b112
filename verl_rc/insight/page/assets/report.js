// The page's own script: draws charts and the heat map from the block of JSON. Text of a run enters by textContent only.
(function () {
"use strict";

const data = JSON.parse(document.getElementById("report-data").textContent);
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#9467bd", "#b8860b", "#17a2a2"];
const HEIGHT = 190;
const FEW = 60; // up to so many points are shown as points too
const charts = new Map(); // number of the chart -> uPlot
let zoom = null; // [first step, last step] that all charts show; null: everything
let zooming = false;

function floats(text) {
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return new Float32Array(bytes.buffer);
}

const steps = data.steps.map((text) => Array.from(floats(text)));
const numbers = (text) => Array.from(floats(text), (value) => (Number.isFinite(value) ? value : null));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const faded = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");

function shown(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === Math.round(value) && size < 1e7) return value.toLocaleString("en");
  if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

function element(name, text, parent) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

// ---- Tables of numbers: what a line is, and its values on the steps of all lines of its chart.

function columnsOf(chart) {
  const tables = chart.lines.map((line) => {
    const columns = [steps[line.x], numbers(line.y)];
    if (line.low) columns.push(numbers(line.low), numbers(line.high));
    return columns;
  });
  const joined = tables.length === 1 ? tables[0] : uPlot.join(tables);
  const columns = [];
  chart.lines.forEach((line, index) => {
    columns.push({ label: line.label, colour: COLOURS[index % COLOURS.length], band: 0 });
    if (line.low) columns.push({ label: line.label + " low", band: -1 }, { label: line.label + " high", band: 1 });
  });
  return { x: joined[0], columns, values: joined.slice(1) };
}

function stacked(values) {
  let below = values[0].map(() => 0);
  return values.map((row) => (below = row.map((value, i) => (value === null || value === undefined ? 0 : value) + below[i])));
}

// ---- Charts.

function seriesOf(chart, table) {
  const few = table.x.length <= FEW;
  return table.columns.map((column, index) => {
    if (column.band) return { label: column.label, stroke: "transparent", width: 0, points: { show: false }, show: true };
    const original = table.values[index];
    return {
      label: column.label,
      stroke: column.colour,
      width: chart.stacked ? 1 : 1.5,
      points: { show: few && !chart.stacked, size: 5, fill: column.colour },
      spanGaps: few,
      fill: chart.stacked && index === 0 ? faded(column.colour, 0.55) : undefined,
      value: (u, value, i, at) => (at === null || at === undefined ? "–" : shown(original[at])),
    };
  });
}

function bandsOf(chart, table) {
  if (chart.stacked) {
    return table.columns.slice(1).map((column, i) => ({ series: [i + 2, i + 1], fill: faded(column.colour, 0.55) }));
  }
  const bands = [];
  table.columns.forEach((column, i) => {
    if (column.band === 1) bands.push({ series: [i + 1, i], fill: faded(table.columns[i - 2].colour, 0.16) });
  });
  return bands;
}

function rangeOf(low, high) {
  if (low === null || low === undefined) return [0, 1];
  if (low === high) return [low - Math.abs(low) / 10, low + (Math.abs(low) / 10 || 1)];
  return uPlot.rangeNum(low, high, 0.1, true);
}

function drawMarks(chart) {
  return (u) => {
    const context = u.ctx, box = u.bbox;
    context.save();
    context.lineWidth = devicePixelRatio;
    context.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    context.strokeStyle = colour("--alert");
    for (const [step] of data.alerts) {
      const x = u.valToPos(step, "x", true);
      if (x >= box.left && x <= box.left + box.width) line(context, x, box.top, x, box.top + box.height);
    }
    context.strokeStyle = colour("--muted");
    for (const bound of chart.healthy || []) {
      if (bound === null || bound <= u.scales.y.min || bound >= u.scales.y.max) continue;
      const y = u.valToPos(bound, "y", true);
      line(context, box.left, y, box.left + box.width, y);
    }
    context.restore();
  };
}

function line(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

function makeChart(figure) {
  const number = Number(figure.dataset.chart), chart = data.charts[number];
  if (charts.has(number)) return;
  const table = columnsOf(chart), place = figure.querySelector(".plot");
  const axis = { stroke: colour("--text"), grid: { stroke: colour("--grid") }, ticks: { stroke: colour("--grid") } };
  const options = {
    width: Math.max(220, place.clientWidth),
    height: HEIGHT,
    scales: {
      x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
      y: { range: (u, low, high) => rangeOf(chart.stacked ? 0 : low, high) },
    },
    axes: [axis, { ...axis, size: 62, values: (u, ticks) => ticks.map(shown) }],
    series: [{ label: "step", value: (u, value) => shown(value) }, ...seriesOf(chart, table)],
    bands: bandsOf(chart, table),
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
    legend: { live: true },
    hooks: { draw: [drawMarks(chart)], setScale: [(u, key) => key === "x" && follow(u)] },
  };
  place.replaceChildren();
  const plot = new uPlot(options, [table.x, ...(chart.stacked ? stacked(table.values) : table.values)], place);
  hideBands(plot, table);
  charts.set(number, plot);
  plot.over.addEventListener("dblclick", showEverything);
  if (zoom) plot.setScale("x", { min: zoom[0], max: zoom[1] });
}

function hideBands(plot, table) {
  const rows = plot.root.querySelectorAll(".u-legend .u-series");
  table.columns.forEach((column, i) => column.band && rows[i + 1] && rows[i + 1].remove());
}

function follow(source) {
  if (zooming) return;
  const { min, max } = source.scales.x;
  if (min === null || min === undefined) return;
  const all = source.data[0];
  if (!zoom && min <= all[0] && max >= all[all.length - 1]) return;
  zooming = true;
  zoom = [min, max];
  for (const plot of charts.values()) if (plot !== source) plot.setScale("x", { min, max });
  zooming = false;
}

function showEverything() {
  zooming = true;
  zoom = null;
  for (const plot of charts.values()) plot.setData(plot.data);
  zooming = false;
}

// ---- Keyboard, and the numbers behind a chart.

function moveCursor(figure, event) {
  const plot = charts.get(Number(figure.dataset.chart));
  if (!plot) return;
  if (event.key === "Escape") return showEverything();
  const all = plot.data[0], at = plot.cursor.idx;
  const next = { ArrowLeft: (at ?? all.length) - 1, ArrowRight: (at ?? -1) + 1, Home: 0, End: all.length - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  const index = Math.min(Math.max(next, 0), all.length - 1);
  plot.setCursor({ left: plot.valToPos(all[index], "x"), top: 10 });
  const chart = data.charts[Number(figure.dataset.chart)], table = columnsOf(chart);
  const words = table.columns.map((column, i) => (column.band ? "" : column.label + " " + shown(table.values[i][index])));
  readout(figure).textContent = "step " + shown(all[index]) + ": " + words.filter(Boolean).join(", ");
}

function readout(figure) {
  const found = figure.querySelector(".readout");
  if (found) return found;
  const made = element("p", "", figure);
  made.className = "readout";
  made.setAttribute("aria-live", "polite");
  return made;
}

function rowsOf(chart) {
  const table = columnsOf(chart);
  const head = ["step", ...table.columns.map((column) => column.label)];
  return [head, ...table.x.map((x, i) => [x, ...table.values.map((values) => values[i])])];
}

function toggleNumbers(figure, button) {
  const there = figure.querySelector(".numbers");
  button.setAttribute("aria-expanded", String(!there));
  if (there) return there.remove();
  const [head, ...rows] = rowsOf(data.charts[Number(figure.dataset.chart)]);
  const box = element("div", "", figure), table = element("table", "", box);
  box.className = "numbers scroll";
  box.tabIndex = 0;
  const header = element("tr", "", element("thead", "", table));
  head.forEach((name) => (element("th", name, header).scope = "col"));
  const body = element("tbody", "", table);
  for (const row of rows) {
    const line = element("tr", "", body);
    row.forEach((value) => element("td", shown(value), line));
  }
}

async function copyNumbers(figure, button) {
  const text = rowsOf(data.charts[Number(figure.dataset.chart)]).map((row) => row.join("\t")).join("\n");
  try {
    await navigator.clipboard.writeText(text);
  } catch (error) {
    const area = element("textarea", "", document.body);
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
}

function addButtons(figure) {
  const caption = figure.querySelector("figcaption");
  const show = element("button", "numbers", caption), copy = element("button", "copy as TSV", caption);
  show.setAttribute("aria-expanded", "false");
  show.addEventListener("click", () => toggleNumbers(figure, show));
  copy.addEventListener("click", () => copyNumbers(figure, copy));
  figure.addEventListener("keydown", (event) => event.target === figure && moveCursor(figure, event));
}

// ---- The heat map: a byte a cell, drawn as a picture and stretched.

const LIGHT = [[253, 234, 69], [166, 157, 117], [87, 92, 109], [18, 53, 112], [0, 20, 60]];
const DARK = [[0, 34, 78], [65, 77, 107], [124, 123, 120], [188, 174, 108], [254, 232, 56]];

function palette() {
  const stops = matchMedia("(prefers-color-scheme: dark)").matches ? DARK : LIGHT;
  return Array.from({ length: 256 }, (_, i) => {
    const place = (i / 255) * (stops.length - 1), low = Math.floor(Math.min(place, stops.length - 2));
    return stops[low].map((value, part) => value + (stops[low + 1][part] - value) * (place - low));
  });
}

function makeHeat(figure) {
  const heat = data.heat;
  const cells = Uint8Array.from(atob(heat.cells), (letter) => letter.charCodeAt(0));
  const picture = document.createElement("canvas");
  [picture.width, picture.height] = [heat.columns, heat.rows];
  const pixels = new ImageData(heat.columns, heat.rows), colours = palette();
  for (let column = 0; column < heat.columns; column++) {
    for (let row = 0; row < heat.rows; row++) {
      const value = cells[column * heat.rows + row], at = 4 * ((heat.rows - 1 - row) * heat.columns + column);
      if (value > 0) pixels.data.set([...colours[value], 255], at);
    }
  }
  picture.getContext("2d").putImageData(pixels, 0, 0);
  const place = figure.querySelector(".plot");
  place.replaceChildren();
  const canvas = element("canvas", "", place);
  paintHeat(canvas, picture, place.clientWidth);
  const cursor = { column: heat.columns - 1, row: Math.floor(heat.rows / 2) };
  const say = () => (readout(figure).textContent = heatWords(cells, cursor));
  canvas.onpointermove = (event) => {
    const [left, width, height] = [62, canvas.clientWidth - 62, canvas.clientHeight - 22];
    cursor.column = Math.min(heat.columns - 1, Math.max(0, Math.floor(((event.offsetX - left) / width) * heat.columns)));
    cursor.row = Math.min(heat.rows - 1, Math.max(0, heat.rows - 1 - Math.floor((event.offsetY / height) * heat.rows)));
    say();
  };
  figure.onkeydown = (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    cursor.column = Math.min(heat.columns - 1, Math.max(0, cursor.column + moves[event.key][0]));
    cursor.row = Math.min(heat.rows - 1, Math.max(0, cursor.row + moves[event.key][1]));
    say();
  };
}

function heatWords(cells, cursor) {
  const heat = data.heat, edges = floats(heat.edges);
  const value = cells[cursor.column * heat.rows + cursor.row];
  const count = value ? Math.round(Math.expm1((value / 255) * Math.log1p(heat.largest))) : 0;
  const step = floats(heat.steps)[cursor.column];
  return `from step ${shown(step)}, log-ratio ${shown(edges[cursor.row])} to ${shown(edges[cursor.row + 1])}: about ${shown(count)} tokens`;
}

function paintHeat(canvas, picture, width) {
  const heat = data.heat, ratio = devicePixelRatio, height = 260, left = 62, foot = 22;
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  [canvas.style.width, canvas.style.height] = [width + "px", height + "px"];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.imageSmoothingEnabled = false;
  const box = [left, 0, width - left, height - foot];
  context.drawImage(picture, ...box);
  context.strokeStyle = colour("--muted");
  context.strokeRect(...box);
  const edges = Array.from(floats(heat.edges)), place = (row) => (1 - row / heat.rows) * (height - foot);
  const rowOf = (value) => edges.findIndex((edge) => edge > value);
  context.fillStyle = colour("--text");
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  for (const value of [10, 1, 0.1, 0.01, 0.001, 0, -0.001, -0.01, -0.1, -1, -10]) {
    const y = value === 0 ? place(heat.rows / 2) : place(rowOf(value));
    context.fillText(String(value), left - 6, y + 4);
  }
  context.textAlign = "center";
  const first = floats(heat.steps);
  for (const share of [0, 0.5, 1]) {
    const column = Math.min(heat.columns - 1, Math.floor(share * (heat.columns - 1)));
    context.fillText(shown(first[column]), Math.max(left + 12, Math.min(width - 16, left + share * (width - left))), height - 6);
  }
  for (const [percent, rows] of Object.entries(heat.percentiles)) {
    context.strokeStyle = colour(percent === "50" ? "--text" : "--alert");
    context.beginPath();
    floats(rows).forEach((row, i) => context.lineTo(left + ((i + 0.5) / heat.columns) * (width - left), place(row + 0.5)));
    context.stroke();
  }
  context.setLineDash([5, 4]);
  context.strokeStyle = colour("--text");
  for (const bound of heat.bounds) line(context, left, place(rowOf(bound)), width, place(rowOf(bound)));
}

// ---- Start: charts are made when they come into view.

const figures = Array.from(document.querySelectorAll("figure.chart"));
const heatFigure = document.getElementById("heat");
const make = (figure) => (figure === heatFigure ? makeHeat(figure) : makeChart(figure));
const all = heatFigure ? [heatFigure, ...figures] : figures;

function makeEverything() {
  all.forEach((figure) => (figure === heatFigure && figure.querySelector("canvas")) || make(figure));
}

function makeAgain() {
  for (const plot of charts.values()) plot.destroy();
  const there = figures.filter((figure) => charts.has(Number(figure.dataset.chart)));
  charts.clear();
  there.forEach(makeChart);
  if (heatFigure && heatFigure.querySelector("canvas")) makeHeat(heatFigure);
}

figures.forEach(addButtons);
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    seen.unobserve(entry.target);
    make(entry.target);
  }
}, { rootMargin: "300px" });
all.forEach((figure) => seen.observe(figure));
addEventListener("beforeprint", makeEverything);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", makeAgain);
let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(makeAgain, 150);
});
document.documentElement.dataset.ready = "yes";
window.report = { charts, makeEverything, zoom: () => zoom };
})();
