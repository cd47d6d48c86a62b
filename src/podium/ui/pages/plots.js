// Plots. uPlot draws axes and grid, and does cursor and selection; lines are drawn here, each over its own x, because
// uPlot would align thousands of runs on one.
"use strict";
Object.assign(Podium, (() => {
  const { element, colour, number, clock, plots } = Podium;

  /** An exponential average that forgets by the distance on x, so that thinning does not change it much. */
  function smoothed(x, y, weight) {
    if (!(weight > 0) || y.length < 3) return y;
    const step = (x[x.length - 1] - x[0]) / (y.length - 1) || 1;
    const found = new Array(y.length);
    let sum = 0, count = 0;
    for (let i = 0; i < y.length; i++) {
      if (y[i] == null) { found[i] = null; continue; }
      const keep = i ? weight ** Math.min(50, (x[i] - x[i - 1]) / step) : 0;
      sum = sum * keep + y[i];
      count = count * keep + 1;
      found[i] = sum / count;
    }
    return found;
  }

  const CLOCK_STEPS = [1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900,
    1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000];

  function niceSplits(low, high, most) {
    const rough = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((part) => part * power).find((one) => one >= rough);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high * (1 + 1e-12); at += step) found.push(at);
    return found;
  }

  function nearest(x, value) {
    let low = 0, high = x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] < value) low = middle; else high = middle;
    }
    return Math.abs(x[low] - value) <= Math.abs(x[high] - value) ? low : high;
  }

  /**
   * A plot with zoom, hover and keys.
   *
   * options: { title, lines, x, y, height, smoothing, keys, onzoom }
   * line: { name, x: [ascending], y, colour, width, alpha, points, dash, mark: [x, y], text: (i) => string }
   * axis: { label, log, format: "number" | "clock" | "percent" | function, zero: start at 0, values: [all splits] }
   */
  class Plot {
    constructor(parent, options) {
      this.options = { height: 230, smoothing: 0, x: {}, y: {}, keys: true, ...options };
      this.hidden = new Set();
      this.view = null;
      this.at = null;
      this.parent = parent;
      parent.classList.add("plot");
      this.area = element("div", { class: "area", tabindex: "0", role: "img" });
      this.keys = element("div", { class: "keys" });
      this.tip = element("div", { class: "tip", role: "status", hidden: true });
      const title = this.options.title ? [element("h3", {}, this.options.title)] : [];
      parent.replaceChildren(...title, this.keys, this.area, this.tip);
      this.area.addEventListener("keydown", (event) => this.key(event));
      this.area.addEventListener("blur", () => this.leave());
      plots.add(this);
      this.seen = false;
      this.area.style.height = `${this.options.height}px`;
      this.sizes = new ResizeObserver(() => this.resize());
      this.sizes.observe(this.area);
      this.waits = new IntersectionObserver((entries) => {
        if (entries.some((entry) => entry.isIntersecting)) this.show();
      }, { rootMargin: "400px" });
      this.waits.observe(this.area);
      this.describe();
    }

    /** Change options; what was zoomed stays unless `x` is of another kind. */
    set(changes) {
      if (changes.x && changes.x.label !== this.options.x.label) this.view = null;
      Object.assign(this.options, changes);
      this.describe();
      if (this.seen) this.build();
    }

    lines() {
      return this.options.lines.filter((line) => !this.hidden.has(line.name) && line.x.length);
    }

    describe() {
      const { title, lines, x, y } = this.options;
      const what = `${title || y.label || "plot"} over ${x.label || "x"}, ${lines.length} lines`;
      this.area.setAttribute("aria-label", `${what}. Arrows read values, plus and minus zoom, 0 shows all.`);
      const shown = this.options.keys && lines.length > 1 && lines.length <= 12 ? lines : [];
      this.keys.replaceChildren(...shown.map((line) => element("button", {
        type: "button", "aria-pressed": String(!this.hidden.has(line.name)),
        onclick: (event) => {
          if (!this.hidden.delete(line.name)) this.hidden.add(line.name);
          event.currentTarget.setAttribute("aria-pressed", String(!this.hidden.has(line.name)));
          if (this.seen) this.build();
        },
      }, element("i", { style: { background: colour(line.colour || "--c0") } }), line.name)));
    }

    show() {
      if (this.seen) return;
      this.seen = true;
      this.waits.disconnect();
      this.build();
    }

    remove() {
      plots.delete(this);
      this.sizes.disconnect();
      this.waits.disconnect();
      if (this.plot) this.plot.destroy();
      this.parent.replaceChildren();
    }

    resize() {
      const width = this.area.clientWidth;
      if (this.plot && width && Math.abs(width - this.plot.width) >= 1) {
        this.plot.setSize({ width, height: this.options.height });
        this.leave();
      }
    }

    values(line) { return this.options.smoothing > 0 && !line.points ? line.smooth : line.y; }

    extent(axis, log, within) {
      let low = Infinity, high = -Infinity;
      for (const line of this.lines()) {
        const y = this.values(line);
        for (let i = 0; i < line.x.length; i++) {
          const at = line.x[i], value = axis === "x" ? at : y[i];
          if (value == null || (log && value <= 0) || (within && (at < within[0] || at > within[1]))) continue;
          if (value < low) low = value;
          if (value > high) high = value;
        }
      }
      return low <= high ? [low, high] : null;
    }

    padded(range, log, by, zero) {
      if (!range) return log ? [1, 10] : [0, 1];
      const [low, high] = range;
      // Values that rounding alone sets apart are one value: between them, no step of an axis could be taken.
      const one = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));
      if (log) {
        const pad = (high / low) ** by * (one ? 1.2 : 1);
        return [low / pad, high * pad];
      }
      const pad = !one ? (high - low) * by : Math.abs(high) * 0.1 || 1;
      if (zero && low >= 0) return [0, high + pad];
      return [low >= 0 && low - pad < 0 ? Math.min(low, 0) : low - pad, high + pad];
    }

    fit() {
      const { x, y } = this.options;
      this.xrange = this.view || this.padded(this.extent("x", x.log), x.log, x.pad || 0, x.zero);
      this.yrange = this.padded(this.extent("y", y.log, this.xrange), y.log, 0.06, y.zero);
    }

    format(axis, value) {
      if (value == null) return "";
      if (typeof axis.format === "function") return axis.format(value);
      if (axis.format === "clock") return clock(value);
      if (axis.format === "percent") return `${number(value)} %`;
      return number(value);
    }

    axis(axis, side) {
      const narrow = (low, high) => axis.log && high / low < 12;
      const spec = {
        side, scale: side === 2 ? "x" : "y", stroke: () => colour("--muted"), font: "11px system-ui, sans-serif",
        grid: { stroke: () => colour("--line"), width: 1 }, ticks: { stroke: () => colour("--line"), width: 1, size: 4 },
        gap: 4, values: (u, splits) => splits.map((value) => this.format(axis, value)),
      };
      if (side === 2) Object.assign(spec, { size: axis.label ? 42 : 26, label: axis.label, labelSize: 16,
        labelFont: "11px system-ui, sans-serif", labelGap: 0, space: 62 });
      else spec.size = (u, values) => 14 + 6.3 * Math.max(3, ...(values || []).map((text) => (text || "").length));
      if (axis.format === "clock" && !axis.log) spec.incrs = CLOCK_STEPS;
      if (axis.values) {
        spec.splits = () => axis.values;
        spec.filter = (u, splits) => splits;
      } else if (axis.log) {
        spec.splits = (u, index, low, high) => {
          const most = side === 2 ? Math.max(2, u.width / 90) : 5;
          if (narrow(low, high)) return niceSplits(low, high, most).filter((at) => at > 0);
          const decades = Math.log10(high / low), parts = decades < 2.5 ? [1, 2, 5] : [1];
          const every = Math.max(1, Math.ceil(decades / (side === 2 ? most : 7)));
          const found = [];
          for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every)
            for (const part of parts) if (part * 10 ** power >= low && part * 10 ** power <= high) found.push(part * 10 ** power);
          return found;
        };
        spec.filter = (u, splits) => splits;
      }
      return spec;
    }

    build() {
      const { x, y, height, smoothing } = this.options;
      for (const line of this.options.lines) line.smooth = smoothed(line.x, line.y, smoothing);
      this.fit();
      if (this.plot) this.plot.destroy();
      this.leave();
      const scale = (axis, range) => ({ time: false, auto: false, distr: axis.log ? 3 : 1, range });
      this.plot = new uPlot({
        width: this.area.clientWidth || 300, height, legend: { show: false },
        cursor: { points: { show: false }, drag: { x: true, y: false, setScale: false }, y: false },
        select: { show: true },
        scales: { x: scale(x, () => this.xrange), y: scale(y, () => this.yrange) },
        axes: [this.axis(x, 2), this.axis(y, 3)],
        series: [{}, { scale: "y" }],
        hooks: {
          draw: [() => this.draw()],
          setSelect: [(u) => {
            if (u.select.width < 4) return;
            const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
            u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            this.zoom(range);
          }],
        },
      }, [this.xrange, [null, null]], this.area);
      this.over = element("canvas", { class: "over" });
      this.plot.over.append(this.over);
      this.plot.over.addEventListener("pointermove", (event) => this.hover(event));
      this.plot.over.addEventListener("pointerdown", (event) => this.hover(event));
      this.plot.over.addEventListener("pointerleave", () => this.leave());
      this.plot.over.addEventListener("dblclick", () => this.zoom(null));
    }

    /** Show a range of x, or all (null); `quiet`: do not tell others. */
    zoom(range, quiet = false) {
      this.view = range && range[1] - range[0] > 1e-9 * Math.abs(range[1]) ? range : null;
      if (this.plot) {
        this.fit();
        this.leave();
        this.plot.batch(() => {
          this.plot.setScale("x", { min: this.xrange[0], max: this.xrange[1] });
          this.plot.setScale("y", { min: this.yrange[0], max: this.yrange[1] });
        });
      }
      if (!quiet && this.options.onzoom) this.options.onzoom(this.view);
    }

    /** Zoom by a factor around the middle, and shift by a share of the width. */
    zoomBy(factor, shift = 0) {
      const log = this.options.x.log, to = log ? Math.log10 : (v) => v, back = log ? (v) => 10 ** v : (v) => v;
      const all = this.padded(this.extent("x", log), log, this.options.x.pad || 0, this.options.x.zero).map(to);
      const [low, high] = (this.view || this.xrange).map(to);
      const middle = (low + high) / 2 + shift * (high - low), half = ((high - low) / 2) * factor;
      const range = [Math.max(all[0], middle - half), Math.min(all[1], middle + half)];
      this.zoom(range[1] - range[0] >= 0.999 * (all[1] - all[0]) ? null : range.map(back));
    }

    /** Positions on the canvas, `scale` times those of the page. */
    mapping(u, box) {
      const along = (axis, [low, high], from, length) => {
        if (!axis.log) return (value) => from + ((value - low) / (high - low)) * length;
        const start = Math.log10(low), width = Math.log10(high) - start;
        return (value) => (value > 0 ? from + ((Math.log10(value) - start) / width) * length : NaN);
      };
      const down = along(this.options.y, this.yrange, 0, box.height);
      return [along(this.options.x, this.xrange, box.left, box.width), (value) => box.top + box.height - down(value)];
    }

    trace(context, line, y, px, py) {
      const [low, high] = this.xrange, x = line.x;
      let first = 0, last = x.length - 1;
      if (this.view) {
        while (first < last && x[first + 1] < low) first++;
        while (last > first && x[last - 1] > high) last--;
      }
      context.beginPath();
      let pen = false;
      for (let i = first; i <= last; i++) {
        const at = y[i] == null ? NaN : py(y[i]), along = px(x[i]);
        if (!(Number.isFinite(at) && Number.isFinite(along))) { pen = false; continue; }
        if (pen) context.lineTo(along, at); else context.moveTo(along, at);
        pen = true;
      }
      context.stroke();
      const dots = line.points || first === last || (last - first < 30 && this.lines().length <= 12);
      if (!dots || line.dash) return;
      for (let i = first; i <= last; i++) {
        if (y[i] == null) continue;
        context.beginPath();
        context.arc(px(x[i]), py(y[i]), (line.points ? 3.2 : 2) * devicePixelRatio, 0, 7);
        context.fill();
      }
    }

    draw() {
      const u = this.plot, context = u.ctx, box = u.bbox, ratio = devicePixelRatio;
      const [px, py] = this.mapping(u, box);
      context.save();
      context.beginPath();
      context.rect(box.left, box.top, box.width, box.height);
      context.clip();
      context.lineJoin = "round";
      for (const line of this.lines()) {
        context.strokeStyle = context.fillStyle = colour(line.colour || "--c0");
        context.lineWidth = (line.width || 1.5) * ratio;
        context.setLineDash((line.dash || []).map((part) => part * ratio));
        const y = this.values(line), alpha = line.alpha == null ? 1 : line.alpha;
        if (y !== line.y && this.lines().length <= 12) {
          context.globalAlpha = 0.22 * alpha;
          this.trace(context, line, line.y, px, py);
        }
        context.globalAlpha = alpha;
        this.trace(context, line, y, px, py);
        if (line.mark) {
          context.setLineDash([]);
          context.beginPath();
          context.arc(px(line.mark[0]), py(line.mark[1]), 5 * ratio, 0, 7);
          context.stroke();
        }
      }
      context.restore();
    }

    hover(event) {
      const box = this.plot.over.getBoundingClientRect();
      const left = event.clientX - box.left, top = event.clientY - box.top;
      const [px, py] = this.mapping(this.plot, { left: 0, top: 0, width: box.width, height: box.height });
      const value = this.plot.posToVal(left, "x");
      let best = null;
      for (const line of this.lines()) {
        const y = this.values(line), near = nearest(line.x, value);
        for (let i = Math.max(0, near - 1); i <= Math.min(line.x.length - 1, near + 1); i++) {
          if (y[i] == null) continue;
          const away = Math.hypot(px(line.x[i]) - left, 1.5 * (py(y[i]) - top));
          if (Number.isFinite(away) && (!best || away < best.away)) best = { line, i, away };
        }
      }
      if (best) this.point(best.line, best.i); else this.leave();
    }

    /** Show a point of a line: its value, and those of the others there if they are few. */
    point(line, i) {
      this.at = { line, i };
      const u = this.plot, width = u.over.clientWidth, height = u.over.clientHeight, ratio = devicePixelRatio;
      const [px, py] = this.mapping(u, { left: 0, top: 0, width, height });
      const left = px(line.x[i]), top = py(this.values(line)[i]), context = this.over.getContext("2d");
      this.over.width = width * ratio;
      this.over.height = height * ratio;
      context.scale(ratio, ratio);
      context.strokeStyle = context.fillStyle = colour(line.colour || "--c0");
      if (this.lines().length > 1 && !line.dash) {
        context.lineWidth = 2.6;
        this.trace(context, { ...line, points: false, dash: [] }, this.values(line), px, py);
      }
      context.beginPath();
      context.arc(left, top, 4, 0, 7);
      context.fill();
      const { x, y } = this.options, all = this.lines(), shown = all.length <= 6 ? all : [line];
      const head = `${x.name || x.label || ""} ${this.format(x, line.x[i])}`.trim();
      this.tip.replaceChildren(element("div", {}, head), ...shown.map((one) => {
        const at = one === line ? i : nearest(one.x, line.x[i]), value = this.format(y, one.y[at]);
        const text = one.text ? one.text(at) : one.name ? `${one.name}: ${value}` : value;
        const shownText = one === line && shown.length > 1 ? element("b", {}, text) : text;
        return element("div", {}, element("i", { style: { background: colour(one.colour || "--c0") } }), shownText);
      }));
      this.tip.hidden = false;
      const offset = u.over.offsetLeft + this.area.offsetLeft, wide = this.parent.clientWidth;
      const place = offset + left + 12 + this.tip.offsetWidth > wide ? offset + left - 12 - this.tip.offsetWidth : offset + left + 12;
      this.tip.style.left = `${Math.max(0, Math.min(place, wide - this.tip.offsetWidth))}px`;
      this.tip.style.top = `${this.area.offsetTop + Math.max(0, top - this.tip.offsetHeight - 8)}px`;
    }

    leave() {
      this.at = null;
      this.tip.hidden = true;
      if (this.over) this.over.width = this.over.width + 0;
    }

    key(event) {
      if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], other = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      const all = this.lines();
      if (event.key === "+" || event.key === "=") this.zoomBy(0.5);
      else if (event.key === "-") this.zoomBy(2);
      else if (event.key === "0" || event.key === "Escape") this.zoom(null);
      else if (step && event.shiftKey) this.zoomBy(1, step * 0.25);
      else if ((step || other) && all.length) {
        let { line, i } = this.at || { line: all[0], i: -1 };
        if (other && this.at) {
          const value = line.x[i];
          line = all[(all.indexOf(line) + other + all.length) % all.length];
          i = nearest(line.x, value);
        } else if (step) i = Math.max(0, Math.min(line.x.length - 1, i + step));
        const [low, high] = this.xrange;
        if (line.x[i] < low || line.x[i] > high) i = nearest(line.x, Math.min(high, Math.max(low, line.x[i])));
        this.point(line, Math.max(0, i));
      } else return;
      event.preventDefault();
    }
  }

  return { smoothed, nearest, Plot };
})());
