// The curves of a report, and what its parts share: the runs, which of them are shown, and in which colours.
"use strict";
const report = Podium.data();
const { element, number, clock, PALETTE } = Podium;
const single = report.runs.length === 1;
report.runs.forEach((run, index) => { run.index = index; run.curves = report.curves[index]; });

/** Which runs are shown, in their order; `runs.js` changes it. */
const shown = { runs: report.runs, colours: new Map() };
const byId = (id) => document.getElementById(id);

const NAMES = { "train/lr": "learning rate", "train/samples_per_second": "samples/s", "device/cpu_percent": "processor use, %",
  "time/input_wait_s": "waiting for input, s", "train/loss_scale": "loss scale", "train/skipped_updates": "skipped updates" };
const isMachine = (name) => /^(time|device|system|network)\//.test(name) || name === "train/samples_per_second";

function everyMetric() {
  const names = new Set();
  for (const curves of report.curves) for (const part of curves.parts) Object.keys(part.metrics).forEach((name) => names.add(name));
  const rank = (name) => (name === report.metric ? 0 : name.startsWith("valid/average_") ? 3 : name.startsWith("valid/") ? 1
    : name === "train/lr" ? 5 : isMachine(name) ? (name === "train/samples_per_second" ? 6 : 7) : 2);
  return [...names].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
}

/** The charts: one run has training and validation in one, many runs have a chart for each name. */
function charts() {
  const found = new Map();
  for (const name of everyMetric()) {
    const split = /^(train|valid)\/(.*)$/.exec(name);
    const plain = split && !NAMES[name] ? split[2].replace(/^average_/, "") : null;
    const title = single && plain ? plain.replaceAll("_", " ") : NAMES[name] || (plain ? name : name.replace(/^\w+\//, "").replaceAll("_", " "));
    const line = !single || !plain ? "" : name.startsWith("valid/average_") ? "averaged weights"
      : name.startsWith("valid/") ? "validation" : "training";
    if (!found.has(title)) found.set(title, { title, names: [], machine: isMachine(name) });
    found.get(title).names.push({ name, line });
  }
  return [...found.values()];
}

const AXES = {
  update: { label: "updates", x: (part) => part.update },
  epoch: { label: "epochs", x: (part, curves) => part.update.map((at) => at * curves.epoch) },
  samples: { label: "samples", x: (part, curves) => part.update.map((at) => at * curves.samples) },
  seconds: { label: "wall time", format: "clock", x: (part) => part.seconds },
};
const LINE_COLOURS = { training: "--c0", validation: "--c1", "averaged weights": "--c2", "": "--c0" };

/** The points of one metric of one run, those without a value left out. */
function points(run, name, axis) {
  const part = run.curves.parts.find((one) => name in one.metrics);
  if (!part) return null;
  const key = `${axis} ${name}`;
  run.cache = run.cache || {};
  if (!run.cache[key]) {
    const all = AXES[axis].x(part, run.curves), values = part.metrics[name], x = [], y = [], updates = [];
    for (let i = 0; i < values.length; i++)
      if (values[i] != null && all[i] != null) { x.push(all[i]); y.push(values[i]); updates.push(part.update[i]); }
    run.cache[key] = { x, y, updates };
  }
  return run.cache[key];
}

function linesOf(chart, axis) {
  const found = [], runs = single ? report.runs : shown.runs;
  for (const run of runs.slice().reverse()) {
    for (const { name, line } of chart.names) {
      const got = points(run, name, axis);
      if (!got || !got.x.length) continue;
      const made = { name: single ? line : run.name, x: got.x, y: got.y, width: single && line !== "training" ? 1.8 : 1.4 };
      if (single) {
        made.colour = LINE_COLOURS[line];
        made.alpha = line === "training" ? 0.75 : 1;
        if (line === "validation" && run.best_update != null) {
          const at = got.updates.indexOf(run.best_update);
          if (at >= 0) { made.mark = [got.x[at], got.y[at]]; made.text = (i) => `validation: ${number(got.y[i])}${i === at ? " (best)" : ""}`; }
        }
      } else {
        made.colour = shown.colours.get(run) || "--c0";
        made.alpha = runs.length > 40 ? 0.5 : 0.95;
        if (runs.length > 200) made.width = 1;
      }
      found.push(made);
    }
  }
  return found.reverse();
}

/** Whether values of a chart are read best on a logarithmic axis: losses over a wide range. */
function wantsLog(title, lines) {
  if (!/(loss|perplexity)$/.test(title)) return false;
  let low = Infinity, high = 0;
  for (const line of lines) for (const value of line.y) { if (value < low) low = value; if (value > high) high = value; }
  return low > 0 && high > 4 * low;
}

const Curves = (() => {
  const made = [];
  const axis = () => byId("axis").value;
  const options = (chart) => {
    const lines = linesOf(chart, axis()), scale = byId("scale").value, way = AXES[axis()];
    const log = scale === "log" || (scale === "auto" && wantsLog(chart.title, lines));
    return {
      lines, smoothing: Number(byId("smoothing").value), keys: single,
      x: { label: way.label, format: way.format, log: byId("logx").checked, pad: 0.01 },
      y: { log, zero: !log && (chart.title === "learning rate" || chart.machine), label: chart.title },
    };
  };

  let waiting = 0;
  const update = () => {
    if (waiting) return;
    waiting = requestAnimationFrame(() => {
      waiting = 0;
      for (const { plot, chart } of made) plot.set(options(chart));
    });
  };
  const all = (action) => made.forEach(({ plot }) => action(plot));

  function start() {
    const longest = report.curves.map((curves) => {
      const ends = curves.parts.map((part) => part.update[part.update.length - 1] || 0);
      return (curves.epoch || 0) * Math.max(0, ...ends);
    });
    byId("axis").value = Math.max(0, ...longest) >= 1 ? "epoch" : "update";
    for (const chart of charts()) {
      const place = element("div");
      byId(chart.machine ? "machine" : "metrics").append(place);
      const plot = new Podium.Plot(place, {
        title: chart.title, ...options(chart),
        onzoom: (view) => all((other) => { if (other !== plot) other.zoom(view, true); }),
      });
      made.push({ plot, chart });
    }
    byId("machine-title").hidden = !made.some(({ chart }) => chart.machine);
    byId("curves").hidden = !made.length;
    for (const id of ["axis", "scale", "logx"]) byId(id).addEventListener("change", () => { if (id !== "scale") all((plot) => { plot.view = null; }); update(); });
    byId("smoothing").addEventListener("input", update);
    byId("closer").addEventListener("click", () => made.length && made[0].plot.zoomBy(0.5));
    byId("wider").addEventListener("click", () => made.length && made[0].plot.zoomBy(2));
    byId("all").addEventListener("click", () => all((plot) => plot.zoom(null, true)));
  }
  return { start, update, made };
})();

/** Throughput and efficiency over devices, with the ideal line. */
function scalingPlots() {
  const place = byId("scaling-plots");
  if (!place || !report.scalings.length) return;
  const devices = [...new Set(report.scalings.flatMap((one) => one.rows.map((row) => row[0])))].sort((a, b) => a - b);
  const label = `${report.scalings[0].device}s`;
  const x = { label, log: true, pad: 0.04, values: devices, name: label };
  const lines = (value, ideal) => report.scalings.flatMap((one, index) => [
    { name: one.name || "measured", x: one.rows.map((row) => row[0]), y: one.rows.map(value), points: true, colour: PALETTE[index % 10] },
    { name: report.scalings.length > 1 ? `${one.name}, ideal` : "ideal", x: one.rows.map((row) => row[0]), y: one.rows.map((row) => ideal(row, one.rows[0])), dash: [5, 4], colour: "--muted", width: 1.2 },
  ]);
  new Podium.Plot(place.appendChild(element("div")), {
    title: "samples/s", x, y: { log: true, label: "samples/s" }, lines: lines((row) => row[1], (row, first) => (first[1] / first[0]) * row[0]),
  });
  new Podium.Plot(place.appendChild(element("div")), {
    title: "efficiency", x, y: { format: "percent", zero: true, label: "efficiency" }, lines: lines((row) => 100 * row[2], () => 100),
  });
}

Curves.start();
scalingPlots();
