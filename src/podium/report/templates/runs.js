// Many runs: their table with filter and order, and what follows it: colours, curves, two keys against each other,
// parallel coordinates, where the time went.
"use strict";
if (!single) (() => {
  const MOST_ROWS = 150, MOST_BARS = 24, MOST_PARALLEL = 1500;
  const PHASES = { startup: "#c7cdd4", compile: "#94a3b8", train: "#2563eb", input_wait: "#e4572e", communication: "#a855f7",
    valid: "#0f9d78", checkpoint: "#eab308", report: "#64748b" };
  const short = (() => {
    const last = report.keys.map((key) => key.split(".").pop());
    return new Set(last).size === last.length ? last : report.keys;
  })();
  const columns = [
    { name: "run", value: (run) => run.name },
    { name: "state", value: (run) => run.state },
    ...report.keys.map((key, index) => ({ name: short[index], key, value: (run) => run.values[index] })),
  ];
  if (report.metric) {
    columns.push({ name: `best ${report.metric}`, alias: "best", value: (run) => run.best, result: true });
    columns.push({ name: "at update", alias: "at", value: (run) => run.best_update });
    columns.push({ name: "last", value: (run) => run.last });
  }
  if (report.target) columns.push({ name: `time to ${report.target}`, alias: "reached", value: (run) => run.reached, text: (value, run) => (value != null ? clock(value) : run.reached_at != null ? "unknown" : "not reached") });
  columns.push(
    { name: "samples/s", alias: "rate", value: (run) => run.rate },
    { name: "time", value: (run) => run.seconds, text: clock },
    { name: "devices", value: (run) => run.devices },
    { name: "processor use", alias: "busy", value: (run) => run.busy, text: (value) => (value == null ? "–" : `${Math.round(value)} %`) },
    { name: "energy", value: (run) => run.energy, text: (value) => (value == null ? "unknown" : `${number(value / 1000)} kJ`) },
    { name: "updates", value: (run) => run.updates },
    { name: "started", value: (run) => run.started },
  );
  const text = (column, run) => {
    const value = column.value(run);
    if (column.text) return column.text(value, run);
    return typeof value === "number" ? number(value) : value == null || value === "" ? "–" : String(value);
  };

  const off = new Set();
  let order = null, everything = false, matching = report.runs;
  const result = columns.find((column) => column.result);
  if (result) order = { column: result, down: !report.less };

  // --- filter -----------------------------------------------------------------------------------------------------
  function condition(word) {
    const found = /^([^<>=!]+)(<=|>=|!=|<|>|=)(.+)$/.exec(word);
    const wanted = found && found[1].toLowerCase();
    const column = found && (columns.find((one) => [one.name, one.key, one.alias].some((name) => name && name.toLowerCase() === wanted)));
    if (!column) return (run) => columns.some((one) => text(one, run).toLowerCase().includes(word));
    const other = Number(found[3]), sign = found[2];
    return (run) => {
      const value = column.value(run);
      if (typeof value === "number" && !Number.isNaN(other))
        return { "<": value < other, ">": value > other, "<=": value <= other, ">=": value >= other, "=": value === other, "!=": value !== other }[sign];
      const same = String(value ?? "").toLowerCase() === found[3].toLowerCase();
      return sign === "=" ? same : sign === "!=" ? !same : false;
    };
  }

  function arrange() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean).map(condition);
    matching = report.runs.filter((run) => words.every((fits) => fits(run)));
    if (order) {
      const { column, down } = order;
      const of = new Map(matching.map((run) => [run, column.value(run)]));
      const absent = (value) => value == null || value === "";
      matching.sort((a, b) => {
        const one = of.get(a), other = of.get(b);
        if (absent(one) || absent(other)) return absent(one) - absent(other);
        const by = typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
        return (down ? -by : by) || a.index - b.index;
      });
    }
    shown.runs = matching.filter((run) => !off.has(run));
    paint();
  }

  // --- colours ----------------------------------------------------------------------------------------------------
  const blend = (share) => `hsl(${Math.round(222 - 205 * share)} 78% ${document.documentElement.dataset.theme === "dark" ? 66 : 47}%)`;
  function paint() {
    const by = byId("colour").value, colours = new Map();
    const column = columns.find((one) => (one.key || one.name) === by);
    if (!column) shown.runs.forEach((run, index) => colours.set(run, PALETTE[index % PALETTE.length]));
    else {
      const values = shown.runs.map(column.value), numbers = [...new Set(values.filter((value) => typeof value === "number"))].sort((a, b) => a - b);
      const names = [...new Set(values.map(String))].sort();
      const place = new Map(column.result ? [] : numbers.map((value, index) => [value, index / Math.max(1, numbers.length - 1)]));
      const ranked = column.result ? shown.runs.filter((run) => run.best != null).sort((a, b) => (report.less ? a.best - b.best : b.best - a.best)) : [];
      ranked.forEach((run, index) => place.set(run, index / Math.max(1, ranked.length - 1)));
      shown.runs.forEach((run, index) => {
        const share = column.result ? place.get(run) : place.get(values[index]);
        if (numbers.length && share != null) colours.set(run, blend(share));
        else if (numbers.length) colours.set(run, "--muted");
        else colours.set(run, PALETTE[names.indexOf(String(values[index])) % PALETTE.length]);
      });
    }
    shown.colours = colours;
    drawTable();
    Curves.update();
    pivot();
    parallel();
    stacks();
  }

  // --- table ------------------------------------------------------------------------------------------------------
  function drawTable() {
    const place = document.querySelector("#runs .rows");
    const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.column : null;
    const head = element("tr", {}, ...columns.map((column) => element("th", {
      scope: "col", "aria-sort": order && order.column === column ? (order.down ? "descending" : "ascending") : "none",
    }, element("button", {
      type: "button", "data-column": column.name,
      onclick: () => { order = { column, down: order && order.column === column ? !order.down : false }; arrange(); },
    }, column.name))));
    const rows = (everything ? matching : matching.slice(0, MOST_ROWS)).map((run) => {
      const box = element("input", { type: "checkbox", "aria-label": `show ${run.name}`, onchange: () => {
        if (!off.delete(run)) off.add(run);
        shown.runs = matching.filter((one) => !off.has(one));
        paint();
      } });
      box.checked = !off.has(run);
      const swatch = element("i", { style: { background: Podium.colour(shown.colours.get(run) || "--line") } });
      const cells = columns.slice(2).map((column) => element("td", {}, text(column, run)));
      return element("tr", { class: off.has(run) ? "off" : "" }, element("td", { title: run.name }, box, " ", swatch, run.name),
        element("td", { class: run.state.split(",")[0] }, run.state), ...cells);
    });
    place.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
    if (rows.length < matching.length) place.append(element("p", { class: "caption" }, element("button", { type: "button", onclick: () => { everything = true; drawTable(); } }, `Show all ${matching.length} rows`)));
    byId("count").textContent = `${shown.runs.length} of ${report.runs.length} runs`;
    if (focused) { const again = [...place.querySelectorAll("button")].find((one) => one.dataset.column === focused); if (again) again.focus(); }
  }

  // --- two keys against each other --------------------------------------------------------------------------------
  const varied = report.keys.map((key, index) => ({ key, name: short[index], of: (run) => run.values[index] }))
    .filter(({ key, of }) => key !== "seed" && new Set(report.runs.map((run) => String(of(run)))).size > 1)
    .filter(({ of }) => new Set(report.runs.map((run) => String(of(run)))).size <= 40);
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  const VALUES = {
    best: { name: report.metric ? `best ${report.metric}` : "", of: (run) => run.best, text: number, less: report.less },
    rate: { name: "samples/s", of: (run) => run.rate, text: number, less: false },
    seconds: { name: "time", of: (run) => run.seconds, text: clock, less: true },
    reached: { name: report.target ? `time to ${report.target}` : "", of: (run) => run.reached, text: clock, less: true },
  };
  const median = (values) => {
    const sorted = values.slice().sort((a, b) => a - b), middle = sorted.length >> 1;
    return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  };

  function pivot() {
    if (byId("pivot-section").hidden) return;
    const rows = varied[byId("pivot-rows").value], across = varied[byId("pivot-columns").value], value = VALUES[byId("pivot-value").value];
    const distinct = (key) => [...new Map(shown.runs.map((run) => [String(key.of(run)), key.of(run)])).values()].sort(compare);
    const down = distinct(rows), right = distinct(across);
    const cell = (row, column) => shown.runs.filter((run) => String(rows.of(run)) === String(row) && String(across.of(run)) === String(column));
    const body = down.map((row) => {
      const cells = right.map((column) => {
        const runs = cell(row, column), values = runs.map(value.of).filter((one) => one != null);
        return { runs, values, middle: values.length ? median(values) : null };
      });
      const known = cells.map((one) => one.middle).filter((one) => one != null);
      const best = known.length ? (value.less ? Math.min(...known) : Math.max(...known)) : null;
      return element("tr", {}, element("th", { scope: "row" }, typeof row === "number" ? number(row) : String(row)), ...cells.map(({ runs, values, middle }) => {
        if (middle == null) return element("td", {}, runs.length ? (value === VALUES.reached && runs.every((run) => run.reached_at == null) ? "not reached" : "–") : "");
        const low = Math.min(...values), high = Math.max(...values);
        const spread = values.length > 1 ? element("small", {}, `${value.text(low)} … ${value.text(high)}${values.length < runs.length ? `, ${values.length} of ${runs.length}` : ""}`) : null;
        return element("td", {}, element(middle === best ? "b" : "span", {}, value.text(middle)), spread);
      }));
    });
    const head = element("tr", {}, element("th", {}, `${rows.name} \\ ${across.name}`), ...right.map((one) => element("th", { scope: "col" }, typeof one === "number" ? number(one) : String(one))));
    byId("pivot").replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)),
      element("p", { class: "caption" }, `${value.name}: of several runs the median (least … most); the best of each row is bold.`));
  }

  function startPivot() {
    byId("pivot-section").hidden = varied.length < 2;
    if (varied.length < 2) return;
    const find = (end, otherwise) => { const at = varied.findIndex(({ key }) => key === end); return at < 0 ? otherwise : at; };
    const across = find("optim.lr", 0), down = find("batch.replicas", across === 0 ? 1 : 0);
    for (const [id, chosen] of [["pivot-rows", down === across ? (across + 1) % varied.length : down], ["pivot-columns", across]]) {
      byId(id).append(...varied.map(({ name }, index) => element("option", { value: index }, name)));
      byId(id).value = chosen;
      byId(id).addEventListener("change", pivot);
    }
    for (const [id, { name, of }] of Object.entries(VALUES)) if (name && report.runs.some((run) => of(run) != null)) byId("pivot-value").append(element("option", { value: id }, name));
    byId("pivot-value").addEventListener("change", pivot);
  }

  // --- parallel coordinates -----------------------------------------------------------------------------------------
  const SVG = "http://www.w3.org/2000/svg";
  function svg(tag, attributes, ...children) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function scaleOf(values) {
    const known = values.filter((value) => value != null && value !== "");
    const numbers = known.every((value) => typeof value === "number"), distinct = [...new Set(known)].sort(compare);
    if (!numbers || distinct.length < 2) return { at: (value) => (distinct.length < 2 ? 0.5 : distinct.indexOf(value) / (distinct.length - 1)), ticks: distinct.slice(0, 12) };
    const low = distinct[0], high = distinct[distinct.length - 1], log = low > 0 && high / low > 20;
    const at = log ? (value) => Math.log(value / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
    const back = log ? (share) => low * (high / low) ** share : (share) => low + share * (high - low);
    return { at, ticks: distinct.length <= 6 ? distinct : [0, 0.25, 0.5, 0.75, 1].map(back) };
  }

  // Leaves out labels that would lie on their neighbours; the first and the last one stay.
  function apart(ticks, place) {
    const last = ticks[ticks.length - 1], kept = [];
    for (const tick of ticks) {
      const near = (other) => other !== undefined && other !== tick && Math.abs(place(other) - place(tick)) < 12;
      if (tick === last || !(near(kept[kept.length - 1]) || near(last))) kept.push(tick);
    }
    return kept;
  }

  function parallel() {
    const place = byId("parallel"), section = byId("parallel-section");
    const keys = report.keys.map((key, index) => ({ name: short[index], of: (run) => run.values[index] }))
      .filter(({ of }) => new Set(report.runs.map((run) => String(of(run)))).size > 1).slice(0, 9);
    section.hidden = !report.metric || keys.length < 1 || report.runs.length < 3;
    if (section.hidden) return;
    const runs = shown.runs.filter((run) => run.best != null).slice(0, MOST_PARALLEL).reverse();
    const axes = [...keys, { name: `best ${report.metric}`, of: (run) => run.best, result: true }];
    const width = Math.max(place.clientWidth || 600, 300), height = 300, top = 40, bottom = 14, side = width < 500 ? 48 : 70;
    const step = (width - 2 * side) / (axes.length - 1), down = height - top - bottom;
    for (const axis of axes) axis.scale = scaleOf(runs.map(axis.of));
    const x = (index) => side + index * step, y = (axis, value) => height - bottom - axis.scale.at(value) * down;
    const ranked = runs.slice().sort((a, b) => (report.less ? a.best - b.best : b.best - a.best));
    const share = new Map(ranked.map((run, index) => [run, index / Math.max(1, ranked.length - 1)]));
    const said = (run) => `${run.name}: ${axes.map((axis) => `${axis.name} ${typeof axis.of(run) === "number" ? number(axis.of(run)) : axis.of(run)}`).join(", ")}`;
    const lines = runs.map((run) => {
      const path = axes.map((axis, index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(axis, axis.of(run)).toFixed(1)}`).join("");
      const line = svg("path", { d: path, fill: "none", stroke: blend(share.get(run)), "stroke-width": 1.4, "stroke-opacity": runs.length > 60 ? 0.45 : 0.8 });
      line.addEventListener("pointerenter", () => { line.setAttribute("stroke-width", 3.5); line.setAttribute("stroke-opacity", 1); byId("parallel-text").textContent = said(run); });
      line.addEventListener("pointerleave", () => { line.setAttribute("stroke-width", 1.4); line.setAttribute("stroke-opacity", runs.length > 60 ? 0.45 : 0.8); });
      return line;
    });
    const cut = (words, room) => (words.length * 6.6 > room ? `${words.slice(0, Math.max(4, Math.floor(room / 6.6) - 1))}…` : words);
    const drawn = axes.map((axis, index) => {
      const name = cut(axis.name, step), half = 3.8 * name.length;
      const outer = !index || index === axes.length - 1; // labels of the first and the last axis stand beside the lines
      return svg("g", {},
        svg("line", { x1: x(index), x2: x(index), y1: top, y2: height - bottom, stroke: "var(--muted)" }),
        svg("text", { x: Math.min(Math.max(x(index), half), width - half), y: index % 2 && step < 90 ? 13 : 26, "text-anchor": "middle", "font-size": 12, "font-weight": 600, fill: "var(--ink)" }, name),
        ...apart(axis.scale.ticks, (value) => y(axis, value)).map((value) => svg("text", { x: x(index) + (index ? 5 : -5), y: y(axis, value) + 4, "text-anchor": index ? "start" : "end", "font-size": 11, fill: "var(--muted)", stroke: "var(--paper)", "stroke-width": 3, "paint-order": "stroke" },
          cut(typeof value === "number" ? number(value) : String(value), outer ? side - 5 : step))));
    });
    const text = `Parallel coordinates of ${runs.length} runs; the best: ${ranked.length ? said(ranked[0]) : "none"}`;
    place.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": text }, ...lines, ...drawn));
    byId("parallel-text").textContent = ranked.length ? `Every line is a run; blue is best. The best: ${said(ranked[0])}` : "No run has a result.";
  }

  // --- where the time went ------------------------------------------------------------------------------------------
  function stacks() {
    const runs = shown.runs.filter((run) => Object.keys(run.phases).length).slice(0, MOST_BARS);
    byId("time-section").hidden = !report.runs.some((run) => Object.keys(run.phases).length);
    const longest = Math.max(1e-9, ...runs.map((run) => Object.values(run.phases).reduce((sum, one) => sum + one, 0)));
    byId("stacks").replaceChildren(...runs.flatMap((run) => [
      element("span", { title: run.name }, run.name),
      element("div", { class: "bar" }, ...Object.keys(PHASES).filter((name) => run.phases[name] > 0).map((name) => element("div", {
        style: { width: `${(100 * run.phases[name]) / longest}%`, background: PHASES[name] }, title: `${name.replaceAll("_", " ")} ${number(run.phases[name])} s` }))),
      element("span", {}, clock(run.seconds)),
    ]));
    const used = Object.keys(PHASES).filter((name) => runs.some((run) => run.phases[name] > 0));
    const legend = used.map((name) => element("span", {}, element("i", { style: { background: PHASES[name] } }), name.replaceAll("_", " ")));
    if (runs.length < shown.runs.length) legend.push(element("em", {}, `the first ${runs.length} of the table`));
    byId("stacks-legend").replaceChildren(...legend);
  }

  // --- start --------------------------------------------------------------------------------------------------------
  byId("colour").append(element("option", { value: "" }, "run"), ...columns.filter((column) => column.key || column.result).map((column) => element("option", { value: column.key || column.name }, column.key ? column.name : column.name)));
  if (report.runs.length > 10 && result) byId("colour").value = result.name;
  byId("colour").addEventListener("change", paint);
  let typing = 0;
  byId("filter").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(arrange, report.runs.length > 300 ? 200 : 60); });
  let wide = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; parallel(); } });
  document.addEventListener("podium-theme", paint);
  startPivot();
  arrange();
})();
