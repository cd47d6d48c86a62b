// The page of `podium monitor --web`: asks for the view of the run every two seconds and shows it.
"use strict";
(() => {
  const { element, number, clock } = Podium, at = (id) => document.getElementById(id);
  const SHARES = [["compute", "--c0"], ["waits for others", "--c3"], ["waits for input", "--c1"]];
  const plots = new Map();
  let failures = 0, ended = false;

  const text = (id, value) => { if (at(id).textContent !== value) at(id).textContent = value; };
  const percent = (share) => (share == null ? "–" : `${Math.round(100 * share)} %`);
  const bytes = (value) => {
    if (value == null) return "–";
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit++; }
    return `${Number(value.toPrecision(3))} ${units[unit]}`;
  };

  function cards(view) {
    const found = [];
    const card = (value, name, note) => found.push(element("div", {}, element("b", {}, value), element("span", {}, name), note ? element("em", {}, note) : null));
    if (view.rate != null) card(number(view.rate), "samples/s");
    if (view.left != null) card(clock(view.left), "left");
    if (view.epoch != null) card(number(view.epoch), "epochs");
    for (const [name, value] of Object.entries(view.last)) {
      if (name === "train/lr" || name === "train/samples_per_second") continue;
      card(number(value), name.replace("train/", "training ").replace("valid/", "validation ").replaceAll("_", " "));
    }
    at("cards").replaceChildren(...found.slice(0, 12));
  }

  function curves(drawings) {
    for (const { title, lines } of drawings) {
      const drawn = lines.map((line, i) => ({ ...line, colour: Podium.PALETTE[i] }));
      if (plots.has(title)) { plots.get(title).set({ lines: drawn }); continue; }
      const place = element("div");
      at("curves").append(place);
      plots.set(title, new Podium.Plot(place, { title, lines: drawn, x: { label: "update" }, y: { zero: /, [%W]$/.test(title) } }));
    }
    if (!plots.size) text("curves", "no records yet");
  }

  function row(one) {
    const other = Math.max(0, 1 - one.shares.reduce((sum, share) => sum + share, 0));
    const parts = [...SHARES.map(([, colour], i) => [one.shares[i], colour]), [other, "--line"]];
    const bar = element("div", { class: "bar share", "aria-hidden": "true" }, ...parts.map(([share, colour]) =>
      element("i", { style: { width: `${100 * share}%`, background: `var(${colour})` } })));
    const cells = [one.index, one.host, one.doing, number(one.rate), bar, ...one.shares.map(percent), one.cpu == null ? "–" : `${Math.round(one.cpu)} %`, bytes(one.memory)];
    return element("tr", { class: one.silent ? "silent" : "" }, ...cells.map((cell) => element("td", {}, cell)));
  }

  function figures(hosts) {
    at("figures").replaceChildren(...hosts.flatMap(({ host, measured, unknown }) => [
      hosts.length > 1 ? element("h3", {}, host) : null,
      element("div", { class: "legend" }, ...measured.map(([name, value]) => element("span", {}, element("em", {}, `${name} `), value))),
      ...unknown.map(([names, reason]) => element("p", { class: "unknown" }, `${names}: unknown, as ${reason}`)),
    ]).filter((part) => part != null));
    if (!hosts.length) text("figures", "nothing measured yet");
  }

  function show(view) {
    const share = view.total ? Math.min(1, view.update / view.total) : 0;
    text("name", view.name);
    text("state", view.state);
    at("state").className = view.state.replace(" ", "-");
    text("sentence", view.sentence || (view.state === "running" ? "Shown as it goes on; closing this page does nothing to it." : ""));
    const bar = document.querySelector("#progress .bar");
    bar.setAttribute("aria-valuenow", String(Math.round(100 * share)));
    bar.firstElementChild.style.width = `${100 * share}%`;
    text("place", view.total ? `update ${view.update.toLocaleString("en-US")} of ${view.total.toLocaleString("en-US")}` : "not started");
    cards(view);
    curves(view.drawings);
    at("rows").replaceChildren(...view.rows.map(row));
    text("waiting", [view.waiting, view.hidden ? `${view.hidden} more instances are not shown` : ""].filter(Boolean).join("; "));
    at("waiting").className = view.waiting.includes("wait for instance") || view.waiting.includes("waits for instance") || view.waiting.includes("silent") ? "waits" : "of";
    figures(view.figures);
    const log = at("log"), below = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
    text("log", view.log.join("\n") || "empty");
    if (below) log.scrollTop = log.scrollHeight;
  }

  async function look() {
    try {
      const answer = await fetch("view.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      show(await answer.json());
      failures = 0;
      ended = false;
    } catch (error) {
      if (++failures >= 2 && !ended) {
        ended = true;
        text("sentence", "The monitor does not answer any more: what is shown is of before. Start it again for more.");
      }
    }
    setTimeout(look, failures ? 5000 : 2000);
  }

  at("legend").replaceChildren(...SHARES.map(([name, colour]) => element("span", {}, element("i", { style: { background: `var(${colour})` } }), name)));
  look();
})();
