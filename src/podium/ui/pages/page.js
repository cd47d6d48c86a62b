// What the scripts of Podium's pages share: the data of the page, elements, numbers, colours, the theme.
"use strict";
const Podium = (() => {
  const root = document.documentElement;
  const plots = new Set();

  /** The data that the page was written with. */
  const data = () => JSON.parse(document.getElementById("data").textContent);

  /** An element with attributes and children; text is always text, never markup. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(made.style, value);
      else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value != null) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child != null));
    return made;
  }

  const colour = (name) => (name.startsWith("--") ? getComputedStyle(root).getPropertyValue(name).trim() : name);
  const PALETTE = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8", "--c9"];

  /** A number with four significant digits, as the terminal shows it. */
  function number(value) {
    if (value == null || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(4)));
  }

  /** Seconds as a clock shows them: 3725 -> 1:02:05. */
  function clock(seconds) {
    if (seconds == null || !Number.isFinite(seconds)) return "–";
    if (seconds < 10 && seconds !== Math.round(seconds)) return `${Number(seconds.toPrecision(2))} s`;
    const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
    const two = (part) => String(part).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  }

  function theme(name, keep = true) {
    root.dataset.theme = name;
    if (keep) try { localStorage.setItem("podium-theme", name); } catch (error) { /* not kept, then */ }
    const button = document.getElementById("theme");
    if (button) button.textContent = name === "dark" ? "Light" : "Dark";
    for (const plot of plots) {
      plot.describe();
      if (plot.plot) plot.plot.redraw();
    }
    document.dispatchEvent(new Event("podium-theme"));
  }

  let before = null;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    theme("light", false);
    for (const plot of plots) plot.show();
  });
  addEventListener("afterprint", () => theme(before || "light", false));
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    if (button) button.addEventListener("click", () => theme(root.dataset.theme === "dark" ? "light" : "dark"));
    theme(root.dataset.theme, false);
  });

  return { data, element, colour, PALETTE, number, clock, plots, theme };
})();
