"use strict";
// Two things on top of the finished charts: another x axis, and a read-out of all charts at the pointer's place.
const figures = JSON.parse(document.getElementById("figures").textContent);
const charts = [...document.querySelectorAll("figure.chart")].map((figure) => ({
  figure,
  data: figures.charts[figure.dataset.chart],
  plot: figure.querySelector(".plot"),
  cursor: figure.querySelector("path.cursor"),
  values: [...figure.querySelectorAll("b[data-value]")].map((element) => ({ element, index: +element.dataset.value, usual: element.textContent })),
}));
const output = document.getElementById("at");
let axis = "step";

const place = (x) => {
  const { low, high } = figures.axes[axis];
  return Math.min(1, Math.max(0, (x - low) / (high - low)));
};

function linePath(xs, ys, joined) {
  let path = "", down = false;
  xs.forEach((x, i) => {
    if (ys[i] !== null) path += down ? `L${x},${ys[i]}` : `M${x},${ys[i]}h0`;
    down = joined && ys[i] !== null;
  });
  return path;
}

function columnPath(edges, bases, tops) {
  let path = `M${edges[0]},${bases[0]}`;
  tops.forEach((top, i) => { path += `V${top}H${edges[i + 1]}`; });
  for (let i = bases.length - 1; i >= 0; i--) path += `V${bases[i]}H${edges[i]}`;
  return path + "Z";
}

function redraw({ figure, data }) {
  const y = (v) => +(data.height * Math.min(1, Math.max(0, (data.high - v) / (data.high - data.low)))).toFixed(1);
  let base = null;
  data.series.forEach((series, index) => {
    const path = figure.querySelector(`path[data-series="${index}"]`);
    const xs = figures.tables[series.table][axis].map((x) => +(1000 * place(x)).toFixed(1));
    if (series.kind === "column") {
      base = base || series.values.map(() => 0);
      const tops = series.values.map((v, i) => base[i] + (v || 0));
      path.setAttribute("d", tops.length ? columnPath(xs, base.map(y), tops.map(y)) : "");
      base = tops;
    } else {
      path.setAttribute("d", linePath(xs, series.values.map((v) => (v === null ? null : y(v))), series.kind === "line"));
    }
  });
  figure.querySelector("ol.x").replaceChildren(...figures.axes[axis].ticks.map(([left, text]) => {
    const item = document.createElement("li");
    item.style.left = `${left}%`;
    item.textContent = text;
    return item;
  }));
}

function short(value) {
  const [size, suffix] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"], [1, ""]].find(([s]) => Math.abs(value) >= s) || [1, ""];
  return `${Number((value / size).toPrecision(3))}${suffix}`;
}

function duration(seconds) {
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.floor(seconds / 60);
  const two = (n) => String(n).padStart(2, "0");
  return minutes < 60 ? `${minutes}m ${two(Math.floor(seconds % 60))}s` : `${Math.floor(minutes / 60)}h ${two(minutes % 60)}m`;
}

const formats = {
  loss: (v) => v.toFixed(4),
  short,
  percent: (v) => `${(100 * v).toFixed(1)}%`,
  seconds: duration,
  scientific: (v) => v.toExponential(2).replace("e+", "e"),
};
const spoken = { step: (v) => `step ${v.toLocaleString("en")}`, tokens: (v) => `${short(v)} tokens`, time: duration, flops: (v) => `${formats.scientific(v)} FLOP` };

// The row of a table nearest to x; of columns, the one x falls into.
function rowAt(table, x, columns) {
  const xs = figures.tables[table][axis];
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  if (columns) return Math.max(0, low - 1);
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

// The pointer's place: a step of the run or, on a page of several runs, which have tables of their own, the place itself.
function pointed(x) {
  const steps = figures.tables.steps;
  if (!steps) return { x, text: spoken[axis](axis === "step" ? Math.round(x) : x) };
  const row = rowAt("steps", x, false);
  const text = ["step", "tokens", "time"].filter((key) => figures.axes[key]).map((key) => spoken[key](steps[key][row])).join(" · ");
  return { x: steps[axis][row], text };
}

function valueAt(series, x) {
  const xs = figures.tables[series.table][axis];
  if (!figures.tables.steps && (x < xs[0] || x > xs[xs.length - 1])) return null;
  return series.values[rowAt(series.table, x, series.kind === "column")];
}

function point(fraction) {
  const { low, high } = figures.axes[axis];
  const { x, text } = pointed(low + fraction * (high - low));
  output.textContent = text;
  for (const { data, cursor, values } of charts) {
    cursor.setAttribute("d", `M${(1000 * place(x)).toFixed(1)},0V${data.height}`);
    for (const { element, index } of values) {
      const series = data.series[index];
      const value = valueAt(series, x);
      element.textContent = value === null || value === undefined ? "–" : formats[data.format](value);
    }
  }
}

function unpoint() {
  output.textContent = "";
  for (const { cursor, values } of charts) {
    cursor.setAttribute("d", "");
    for (const { element, usual } of values) element.textContent = usual;
  }
}

for (const { plot } of charts) {
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    point((event.clientX - box.left) / box.width);
  });
  plot.addEventListener("pointerleave", unpoint);
}
const axisSwitch = document.querySelector(".switch");
if (axisSwitch) {
  axisSwitch.hidden = false;
  axisSwitch.addEventListener("change", (event) => {
    axis = event.target.value;
    charts.forEach(redraw);
    unpoint();
  });
}
