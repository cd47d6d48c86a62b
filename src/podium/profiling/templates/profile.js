// The page of `podium profile`: rates, timeline, roofline, tables, memory.
"use strict";
(() => {
  const { element, number, PALETTE, Plot } = Podium, at = (id) => document.getElementById(id);
  const data = Podium.data(), SVG = "http://www.w3.org/2000/svg";
  const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;
  const bytes = (value) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit++; }
    return `${Number(value.toPrecision(3))} ${units[unit]}`;
  };
  const us = (value) => (value >= 1000 ? `${number(value / 1000)} ms` : `${number(value)} µs`);
  const svg = (tag, attributes = {}, ...children) => {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const bar = (share, colour = "--c0") => element("td", { class: "wide" }, element("span", { class: "bar" },
    element("i", { style: { width: `${100 * Math.min(1, share)}%`, background: `var(${colour})` } })));
  const cells = (...texts) => texts.map((text) => element("td", {}, text));
  const named = (name, ours) => element("td", { class: "name" }, name, ours ? element("span", { class: "ours" }, "Podium") : null);

  // --- rates and cards ---
  const rates = [["input only", data.rates.input], ["compute only", data.rates.compute], ["both together", data.rates.both]];
  const most = 1.5 * Math.max(data.rates.compute, data.rates.both);  // input is often so much faster that nothing else would be seen
  at("rates").replaceChildren(...rates.flatMap(([name, rate], i) => [element("span", {}, name),
    element("i", { style: { width: `${Math.min(100, (100 * rate) / most)}%`, background: `var(${PALETTE[i]})` } }), element("b", {}, number(rate))]));
  const flops = data.layers.reduce((sum, row) => sum + row.flops, 0), length = data.timeline.length;
  const card = (value, name, note) => element("div", {}, element("b", {}, value), element("span", {}, name), note ? element("em", {}, note) : null);
  const mean = data.update_us, achieved = (1e6 * flops) / mean;
  at("cards").replaceChildren(...[
    card(us(mean), "an update under the profiler"),
    ...data.parts.filter(([, ms]) => ms > 0).map(([name, ms]) => card(percent((1000 * ms) / mean), name === "other" ? "between the parts" : name, us(1000 * ms))),
    flops ? card(`${number(achieved / 1e9)} GFLOP/s`, "achieved", `${percent(achieved / data.peaks.flops)} of ${number(data.peaks.flops / 1e9)} GFLOP/s`) : null,
    card(`${number(data.peaks.bytes / 1e9)} GB/s`, "memory bandwidth", "measured"),
  ].filter(Boolean));

  // --- timeline ---
  const LANES = [["part", "update"], ["module", "modules"], ["operator", "operators"]], ROW = 22;
  let view = [0, length];
  const rows = { part: 1, module: 1, operator: 1 };
  const placed = [];
  for (const [lane] of LANES) {
    const ends = [];
    for (const [of, name, start, took] of data.timeline.bars) {
      if (of !== lane) continue;
      let depth = ends.findIndex((end) => end <= start + 0.5);
      if (depth < 0) depth = ends.length;
      if (depth > 9) continue;
      ends[depth] = start + took;
      placed.push({ lane, name, start, took, depth });
    }
    rows[lane] = Math.max(1, ends.length);
  }
  const tops = {};
  let height = 20;
  for (const [lane] of LANES) { tops[lane] = height + 16; height += rows[lane] * ROW + 20; }
  const hashed = (text) => { let sum = 0; for (const char of text.replace(" (backward)", "")) sum = (sum * 31 + char.codePointAt(0)) >>> 0; return sum; };
  function drawTimeline() {
    const parent = at("timeline"), width = Math.max(280, parent.clientWidth), x = (time) => ((time - view[0]) / (view[1] - view[0])) * width;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
    const step = 10 ** Math.floor(Math.log10((view[1] - view[0]) / 4)), every = step * Math.ceil((view[1] - view[0]) / step / 8);
    for (let tick = Math.ceil(view[0] / every) * every; tick < view[1]; tick += every) {
      picture.append(svg("line", { x1: x(tick), x2: x(tick), y1: 14, y2: height, stroke: "var(--line)" }), svg("text", { x: x(tick) + 3, y: 11 }, us(tick)));
    }
    for (const { lane, name, start, took, depth } of placed) {
      const left = Math.max(0, x(start)), right = Math.min(width, x(start + took));
      if (right <= 0 || left >= width || right - left < 0.3) continue;
      const y = tops[lane] + depth * ROW, fill = `var(${PALETTE[hashed(name) % PALETTE.length]})`;
      const box = svg("rect", { x: left, y, width: Math.max(0.8, right - left - 0.6), height: ROW - 3, rx: 3, fill, "data-name": `${name}: ${us(took)}, from ${us(start)}` });
      if (name.endsWith("(backward)")) box.setAttribute("fill-opacity", "0.65");
      picture.append(box);
      if (right - left > 46) {
        const fits = Math.floor((right - left - 8) / 6.4), text = name.length > fits ? `${name.slice(0, Math.max(1, fits - 1))}…` : name;
        picture.append(svg("text", { x: left + 4, y: y + 13.5, class: "label" }, text));
      }
    }
    for (const [lane, name] of LANES) picture.append(svg("text", { x: 0, y: tops[lane] - 5 }, name));
    parent.replaceChildren(picture);
  }
  const zoom = (low, high) => {
    const wide = Math.max(length / 2000, Math.min(length, high - low));
    low = Math.max(0, Math.min(length - wide, low));
    view = [low, low + wide];
    drawTimeline();
  };
  let from = null;
  const time = (event) => {
    const box = at("timeline").getBoundingClientRect();
    return view[0] + Math.max(0, Math.min(1, (event.clientX - box.left) / box.width)) * (view[1] - view[0]);
  };
  at("timeline").addEventListener("pointerdown", (event) => { from = time(event); });
  addEventListener("pointerup", (event) => {
    if (from == null) return;
    const to = time(event);
    if (Math.abs(to - from) > 0.01 * (view[1] - view[0])) zoom(Math.min(from, to), Math.max(from, to));
    from = null;
  });
  at("timeline").addEventListener("pointermove", (event) => { at("bar").textContent = event.target.getAttribute("data-name") || ""; });
  at("timeline").addEventListener("dblclick", () => zoom(0, length));
  at("timeline").addEventListener("keydown", (event) => {
    const wide = view[1] - view[0], middle = (view[0] + view[1]) / 2;
    if (event.key === "+" || event.key === "=") zoom(middle - wide / 4, middle + wide / 4);
    else if (event.key === "-") zoom(middle - wide, middle + wide);
    else if (event.key === "0") zoom(0, length);
    else if (event.key === "ArrowLeft") zoom(view[0] - wide / 4, view[1] - wide / 4);
    else if (event.key === "ArrowRight") zoom(view[0] + wide / 4, view[1] + wide / 4);
    else return;
    event.preventDefault();
  });
  at("all").addEventListener("click", () => zoom(0, length));

  // --- roofline ---
  const { flops: peak, bytes: bandwidth } = data.peaks, layers = data.roofline, ridge = peak / bandwidth;
  if (layers.length) {
    const low = Math.min(ridge, ...layers.map((row) => row.intensity)) / 2, high = Math.max(ridge, ...layers.map((row) => row.intensity)) * 2;
    const roof = { name: "the machine's roof", x: [low, ridge, high], y: [low * bandwidth / 1e9, peak / 1e9, peak / 1e9], colour: "--c7", dash: [5, 4] };
    const dots = layers.map((row) => ({ name: row.name, points: true, colour: row.kernel ? "--c2" : "--c0", x: [row.intensity], y: [row.rate / 1e9],
      text: () => `${row.name}: ${number(row.rate / 1e9)} GFLOP/s, ${percent(row.rate / row.roof)} of the roof there, ${number(row.ms)} ms` }));
    new Plot(at("roofline"), { title: "GFLOP/s", height: 300, keys: false, lines: [roof, ...dots], x: { label: "FLOPs per byte", log: true }, y: { label: "GFLOP/s", log: true } });
    at("roofkeys").replaceChildren(...[["the machine's roof", "--c7"], ["layers", "--c0"], ["layers with a kernel of Podium", "--c2"]].map(([name, colour]) =>
      element("span", {}, element("i", { style: { background: `var(${colour})` } }), name)));
    const worst = layers.reduce((a, b) => (b.ms * Math.max(0, 1 - b.rate / b.roof) > a.ms * Math.max(0, 1 - a.rate / a.roof) ? b : a));
    at("roof").textContent = `Most time to gain: ${worst.name}, at ${percent(worst.rate / worst.roof)} of what the machine allows there. Peak ${number(peak / 1e9)} GFLOP/s, ${number(bandwidth / 1e9)} GB/s.`;
  } else at("roof").textContent = "No layer of this model has products or convolutions.";

  // --- tables ---
  const total = data.operators.reduce((sum, row) => sum + row.ms, 0) || 1;
  const longest = Math.max(...data.layers.map((row) => row.forward + row.backward), 1e-9);
  const layer = (row) => element("tr", {}, named(row.name), element("td", { class: "wide" },
    element("span", { class: "bar" }, element("i", { style: { width: `${(100 * row.forward) / longest}%`, background: "var(--c0)" } }), element("i", { style: { width: `${(100 * row.backward) / longest}%`, background: "var(--c3)" } }))),
    ...cells(number(row.forward), number(row.backward), percent((row.forward + row.backward) / total), row.flops ? number(row.flops / 1e9) : "–", row.flops ? number(row.rate / 1e9) : "–", row.flops ? percent(row.rate / peak) : "–"), named(row.operator, row.kernel));
  const large = data.layers.filter((row) => row.forward + row.backward >= 0.005 * total);
  at("layers").replaceChildren(...large.map(layer));
  at("moremodules").hidden = large.length === data.layers.length;
  at("moremodules").addEventListener("click", () => {
    at("layers").replaceChildren(...data.layers.map(layer));
    at("moremodules").hidden = true;
  });
  const operator = (row) => element("tr", {}, named(row.name, row.kernel), bar(row.ms / data.operators[0].ms, row.kernel ? "--c2" : "--c0"),
    ...cells(number(row.calls), number(row.ms), percent(row.ms / total), row.flops ? number(row.flops / 1e9) : "–", row.flops && row.ms ? number(row.flops / row.ms / 1e6) : "–"));
  const FIRST = 15;
  at("operators").replaceChildren(...data.operators.slice(0, FIRST).map(operator));
  at("more").hidden = data.operators.length <= FIRST;
  at("more").addEventListener("click", () => {
    at("operators").append(...data.operators.slice(FIRST).map(operator));
    at("more").hidden = true;
  });

  // --- memory ---
  const COLOURS = { weights: "--c0", optimiser: "--c3", input: "--c1", activations: "--c2", gradients: "--c4", temporary: "--c7" };
  const memory = data.memory;
  function drawMemory() {
    const parent = at("memory"), width = Math.max(280, parent.clientWidth), height = 260, left = 56, below = 22, end = memory.times[memory.times.length - 1] || 1;
    const sums = memory.times.map(() => 0), top = 1.06 * Object.values(memory.peak).reduce((a, b) => a + b, 0) || 1;
    const x = (time) => left + (time / end) * (width - left - 6), y = (value) => 8 + (1 - value / top) * (height - below - 8);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
    for (let i = 0; i <= 4; i++) picture.append(svg("line", { x1: left, x2: width, y1: y((top * i) / 4), y2: y((top * i) / 4), stroke: "var(--line)" }), svg("text", { x: left - 6, y: y((top * i) / 4) + 4, "text-anchor": "end" }, bytes((top * i) / 4)));
    for (const [kind, colour] of Object.entries(COLOURS)) {
      const under = [...sums], points = [];
      memory.bytes[kind].forEach((value, i) => { sums[i] += value; });
      memory.times.forEach((time, i) => {
        if (i) points.push(`${x(time).toFixed(1)},${y(sums[i - 1]).toFixed(1)}`);
        points.push(`${x(time).toFixed(1)},${y(sums[i]).toFixed(1)}`);
      });
      for (let i = under.length - 1; i >= 0; i--) {
        points.push(`${x(memory.times[i]).toFixed(1)},${y(under[i]).toFixed(1)}`);
        if (i) points.push(`${x(memory.times[i]).toFixed(1)},${y(under[i - 1]).toFixed(1)}`);
      }
      picture.append(svg("polygon", { points: points.join(" "), fill: `var(${colour})`, "fill-opacity": "0.85" }));
    }
    for (const [name, start, stop] of memory.parts) {
      if (x(stop) - x(start) > 50) picture.append(svg("line", { x1: x(start), x2: x(start), y1: 8, y2: height - below, stroke: "var(--muted)", "stroke-dasharray": "3 3" }), svg("text", { x: x(start) + 3, y: height - 6 }, name));
    }
    picture.append(svg("line", { x1: x(memory.at), x2: x(memory.at), y1: 4, y2: height - below, stroke: "var(--bad)", "stroke-width": 1.5 }));
    parent.replaceChildren(picture);
  }
  if (memory) {
    const sum = Object.values(memory.peak).reduce((a, b) => a + b, 0), during = memory.parts.filter(([, start, stop]) => start <= memory.at && memory.at <= stop).pop();
    const parts = Object.entries(memory.peak).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
    at("peak").textContent = `Peak ${bytes(sum)}${during ? `, in the ${during[0]} pass`.replace("optimiser pass", "optimiser's step").replace("input pass", "input") : ""}: ${parts.slice(0, 3).map(([kind, value]) => `${kind} ${percent(value / sum)}`).join(", ")}.`;
    at("kinds").replaceChildren(...Object.entries(COLOURS).map(([kind, colour]) => element("span", {}, element("i", { style: { background: `var(${colour})` } }), `${kind} `, element("em", {}, `${bytes(memory.peak[kind])} at the peak`))));
    const process = memory.process == null ? "" : ` The process as a whole had at most ${bytes(memory.process)} in an update without the profiler, measured by the system: the rest is Python, torch's libraries, compiled kernels, and what these and threads keep without torch.`;
    at("process").textContent = `Blocks of torch's allocator, by when they came and went; weights, optimiser state and samples by their sizes.${process}`;
    at("blocks").replaceChildren(...memory.largest.map((block) => element("tr", {}, named(block.operator || "–"), ...cells(block.module || "–", block.kind, bytes(block.bytes)))));
  }

  // --- instances ---
  if (data.instances) {
    const slowest = Math.max(...data.instances.rows.map((row) => row.own + row.waits), 1e-9);
    at("instances").replaceChildren(...data.instances.rows.map((row) => element("tr", {}, element("td", {}, String(row.index)), element("td", { class: "wide" },
      element("span", { class: "bar" }, element("i", { style: { width: `${(100 * row.own) / slowest}%`, background: "var(--c0)" } }), element("i", { style: { width: `${(100 * row.waits) / slowest}%`, background: "var(--c1)" } }))),
      ...cells(number(row.own), number(row.waits), number(row.slow), row.exchange == null ? "unknown" : number(row.exchange), row.hidden == null ? "–" : percent(row.hidden)))));
  }

  const draw = () => { drawTimeline(); if (memory) drawMemory(); };
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 60); });
  addEventListener("beforeprint", draw);
  draw();
})();
