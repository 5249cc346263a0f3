"use strict";
// Draws the page of a plan from the JSON data in the page. All text is set as text, never as HTML.
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const texts = data.texts || {};
  const t = (text, values = {}) => (texts[text] || text).replace(/\{(\w+)\}/g, (mark, name) => (name in values ? String(values[name]) : mark));
  const chip = (color) => h("span", { class: "chip", style: { background: color }, "aria-hidden": "true" });
  const bytes = (v) => { for (const [unit, scale] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (Math.abs(v) >= scale) return `${(v / scale).toFixed(Math.abs(v) < 100 * scale ? 1 : 0)} ${unit}`; return `${v} B`; };
  const short = (v) => (Math.abs(v) >= 1000 ? `${+(v / 1000).toPrecision(3)}k` : String(+v.toPrecision(3)));
  const COLORS = ["--accent", "--teal", "--accent-3", "--violet", "--warm", "--rose", "--amber", "--accent-2", "--grey", "--grey-2"];
  let plots = [];

  const section = (id, title, hint, ...more) => h("section", { id }, h("div", { class: "section-head" }, h("h2", {}, title), h("span", { class: "hint" }, hint || ""), more));
  const table = (heads, rows, marks = () => "") => h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, rows.map((row, i) => h("tr", { class: marks(i) }, row.map((cell, k) => h("td", { class: k === 0 ? "mono" : "" }, cell)))))));
  const axisOf = () => ({ stroke: css("--faint"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: '11px Inter, system-ui, "Liberation Sans", sans-serif' });

  const memoryPlot = (grid, one) => {
    const readout = h("p", { class: "readout" });
    const box = h("div", { class: "plot", style: { height: "300px" } });
    const keys = h("ul", { class: "keys" });
    grid.append(h("article", { class: data.memory.length === 1 ? "panel full" : "panel" }, h("header", {}, h("h3", {}, one.name), readout), box, keys, h("p", { class: "panel-note" }, t("Peak: {peak}, in {place}", { peak: bytes(one.peak), place: one.place }))));
    const x = one.phases.map((_, i) => i);
    let sum = x.map(() => 0);
    const columns = one.series.map((values, i) => {
      sum = sum.map((s, k) => s + values[k]);
      return { label: one.categories[i][0], raw: values, values: sum, color: css(COLORS[i % COLORS.length]) };
    });
    const total = sum, limit = data.capacity - one.reserve, highest = Math.max(...total);
    const isShown = highest > 0.25 * limit, most = isShown ? Math.max(limit, highest) : highest * 1.15; // a limit far away would flatten the plot
    const axis = axisOf();
    // Areas are drawn from the highest to the lowest, so that each covers what is below it.
    const areas = columns.toReversed();
    const plot = new uPlot({
      width: Math.max(200, box.clientWidth), height: 300, legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: false }, y: { range: [0, most * 1.06] } },
      axes: [{ ...axis, size: 8, values: () => [] }, { ...axis, size: 62, values: (u, values) => values.map(bytes) }],
      series: [{}, ...areas.map((c) => ({ label: c.label, stroke: c.color, fill: c.color, width: 0, points: { show: false } }))],
      hooks: {
        setCursor: [(u) => read(u.cursor.idx)],
        draw: [(u) => {
          const { ctx, bbox } = u, y = isShown ? Math.round(u.valToPos(limit, "y", true)) : bbox.top - 100;
          ctx.save();
          ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
          ctx.strokeStyle = css("--bad"); ctx.fillStyle = css("--bad"); ctx.lineWidth = 1.5 * devicePixelRatio; ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
          ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
          ctx.font = `${11 * devicePixelRatio}px Inter, system-ui, sans-serif`; ctx.textAlign = "right";
          ctx.fillText(t("limit {limit}", { limit: bytes(limit) }), bbox.left + bbox.width - 4 * devicePixelRatio, y + 14 * devicePixelRatio);
          ctx.setLineDash([]); ctx.strokeStyle = css("--faint"); ctx.fillStyle = css("--text"); ctx.lineWidth = devicePixelRatio; ctx.textAlign = "left";
          one.phases.forEach((phase, i) => {
            if (i && one.phases[i - 1] === phase) return;
            const left = Math.round(u.valToPos(i, "x", true));
            if (i) { ctx.beginPath(); ctx.moveTo(left, bbox.top); ctx.lineTo(left, bbox.top + bbox.height); ctx.stroke(); }
            if (one.phases.length - i > one.phases.length / 14) ctx.fillText(phase, left + 5 * devicePixelRatio, bbox.top + 12 * devicePixelRatio);
          });
          ctx.restore();
        }],
      },
    }, [x, ...areas.map((c) => c.values)], box);
    const peak = total.indexOf(Math.max(...total));
    const read = (index) => {
      const at = index === null || index === undefined ? peak : index;
      keys.replaceChildren(...columns.map((c) => h("li", {}, chip(c.color), c.label, " ", h("b", {}, bytes(c.raw[at])))));
      readout.replaceChildren(h("b", {}, bytes(total[at])), ` ${one.lines[at] || one.phases[at]}`);
    };
    read(null);
    plots.push([plot, box, 300]);
  };

  const rankPlot = (grid, title, values, format, limit) => {
    const { ranks } = data.over_ranks;
    const readout = h("p", { class: "readout" }), box = h("div", { class: "plot", style: { height: "190px" } });
    grid.append(h("article", { class: "panel" }, h("header", {}, h("h3", {}, title), readout), box));
    const axis = axisOf(), x = ranks.map((_, i) => i), color = css("--accent");
    const series = [{}, { stroke: color, width: 2, points: { show: true, size: 6, fill: color }, fill: `color-mix(in srgb, ${color} 12%, transparent)` }];
    const columns = [x, values];
    if (limit) { series.push({ stroke: css("--bad"), width: 1.5, dash: [6, 4], points: { show: false } }); columns.push(x.map(() => limit)); }
    const plot = new uPlot({
      width: Math.max(160, box.clientWidth), height: 190, legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: false, range: [-0.3, x.length - 0.7] }, y: { range: (u, low, high) => [0, high * 1.1 || 1] } },
      axes: [{ ...axis, size: 26, splits: () => x, values: () => ranks.map((v, i) => (ranks.length <= 8 || i % 2 === 0 ? v.toLocaleString("en") : "")) }, { ...axis, size: 62, values: (u, all) => all.map(format) }],
      series, hooks: { setCursor: [(u) => read(u.cursor.idx)] },
    }, columns, box);
    const read = (index) => readout.replaceChildren(...(index === null || index === undefined ? [] : [t("{ranks} ranks: ", { ranks: ranks[index].toLocaleString("en") }), h("b", {}, format(values[index]))]));
    plots.push([plot, box, 190]);
  };

  const moon = () => {
    const SVG = "http://www.w3.org/2000/svg", svg = document.createElementNS(SVG, "svg"), ring = document.createElementNS(SVG, "path");
    for (const [name, value] of Object.entries({ viewBox: "0 0 16 16", width: 16, height: 20, "aria-hidden": "true" })) svg.setAttribute(name, value);
    ring.setAttribute("d", "M8 1.5a6.5 6.5 0 1 0 0 13a6.5 6.5 0 1 0 0-13zM8 3a5 5 0 0 1 0 10z");
    ring.setAttribute("fill", "currentColor");
    ring.setAttribute("fill-rule", "evenodd");
    svg.append(ring);
    return svg;
  };

  const render = () => {
    for (const [plot] of plots) plot.destroy();
    plots = [];
    const isDark = root.dataset.theme === "dark";
    document.getElementById("nav").replaceChildren(...[["memory", t("Memory")], ["layouts", t("Layouts")], ["scale", t("Number of ranks")], ["traffic", t("Traffic")], ["formulas", t("Formulas")]].map(([id, text]) => h("a", { href: `#${id}` }, text)));
    document.getElementById("controls").replaceChildren(h("button", { class: "button", type: "button", id: "theme", "aria-pressed": String(isDark), "aria-label": t("Dark colors"), title: t("Dark colors"), onclick: () => { root.dataset.theme = isDark ? "light" : "dark"; root.dataset.chosen = ""; render(); } }, moon()));
    const main = document.getElementById("main");
    main.replaceChildren(
      h("div", { class: "head" }, h("h1", {}, data.verdict), h("span", { class: data.fits ? "badge good" : "badge bad" }, data.fits ? t("fits") : t("does not fit"))),
      h("p", { class: "sub" }, data.title), h("p", { class: "sub" }, data.cluster), h("p", { class: "sub" }, data.reserve));
    if (data.best) main.append(h("p", { class: "sub" }, t("The fastest layout that fits: {name}", { name: data.best.name })), h("pre", { class: "command mono" }, data.best.command));
    if (data.changes.length) {
      const node = section("changes", t("Single changes that make it fit"), t("the cheapest first"));
      node.append(h("article", { class: "panel" }, table([t("change"), t("flags or arguments"), t("memory"), t("step")], data.changes)));
      main.append(node);
    }
    const memory = section("memory", t("Memory over the step"), t("of the fullest rank; the dashed line leaves room for what is not counted"));
    const grid = h("div", { class: data.memory.length === 1 ? "grid" : "grid halves" });
    memory.append(grid);
    main.append(memory);
    for (const one of data.memory) memoryPlot(grid, one);
    const layouts = section("layouts", t("Layouts"), t("with the same global batch, the fastest first"));
    layouts.append(h("article", { class: "panel" }, h("div", { class: "ranks" }, table([t("layout"), t("micro-batch"), t("accumulation"), t("recomputed"), t("memory"), t("left"), t("step")], data.layouts.map((one) => one.cells), (i) => (data.layouts[i].fits ? "" : "default")))));
    main.append(layouts);
    if (data.over_ranks.ranks.length > 1) {
      const scale = section("scale", t("Number of ranks"), t("{name}, with the same micro-batch on each rank", { name: data.of })), cells = h("div", { class: "grid" });
      scale.append(cells);
      main.append(scale);
      rankPlot(cells, t("Memory of a rank"), data.over_ranks.memory, bytes, data.capacity);
      rankPlot(cells, t("Samples per second"), data.over_ranks.rate, short);
      rankPlot(cells, t("Seconds of a device per sample"), data.over_ranks.cost, short);
    }
    const traffic = section("traffic", t("Traffic and host memory"), data.of), pair = h("div", { class: "grid" });
    pair.append(h("article", { class: "panel wide" }, h("h3", {}, t("Collectives of an optimizer step")), data.collectives.length ? table([t("collective"), t("mesh axis"), t("calls per step"), t("bytes per step")], data.collectives) : h("p", { class: "panel-note" }, t("One rank does not communicate."))),
      h("article", { class: "panel" }, h("h3", {}, t("Peaks of host memory")), h("dl", { class: "facts" }, data.host.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))));
    traffic.append(pair);
    main.append(traffic);
    const formulas = section("formulas", t("Formulas"), data.of);
    formulas.append(h("article", { class: "panel" }, table([t("number"), t("formula")], data.formulas), data.notes.map((note) => h("p", { class: "panel-note" }, note))));
    main.append(formulas, h("footer", {}, h("span", {}, t("Written by echelon {version}", { version: data.echelon })), h("span", {}, t("Times put layouts in order; they do not predict a clock."))));
  };

  const media = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => { if (!("chosen" in root.dataset)) root.dataset.theme = media.matches ? "dark" : "light"; };
  media.addEventListener("change", () => { follow(); render(); });
  addEventListener("resize", () => { for (const [plot, box, height] of plots) plot.setSize({ width: Math.max(160, box.clientWidth), height }); });
  follow();
  render();
})();
