"use strict";
// Draws the report from the JSON data in the page. All text is set as text, never as HTML.
(() => {
  const root = document.documentElement;
  const state = { axis: "step", run: 0, smooth: true, log: false, zoom: null, all: false, search: "", output: 0 };
  let data = JSON.parse(document.getElementById("data").textContent);
  // Sentences in the user's language: English sentence -> translation, both with {name} for values; empty in English.
  const texts = data.texts || {};
  const t = (text, values = {}) => (texts[text] || text).replace(/\{(\w+)\}/g, (mark, name) => (name in values ? String(values[name]) : mark));
  let plots = [];
  let frame = 0;

  // ---- elements and numbers
  const SVG = "http://www.w3.org/2000/svg";
  const short = (v) => {
    if (v === null || v === undefined || Number.isNaN(v)) return "-";
    const a = Math.abs(v);
    if (a === 0) return "0";
    if (a >= 1e9) return +(v / 1e9).toPrecision(3) + "G";
    if (a >= 1e6) return +(v / 1e6).toPrecision(3) + "M";
    if (a >= 1e4) return +(v / 1e3).toPrecision(3) + "k";
    if (a < 1e-3) return v.toExponential(2).replace(/\.?0+e/, "e");
    return String(+v.toPrecision(4));
  };
  const tick = (v) => {
    if (v === null) return "";
    const a = Math.abs(v);
    if (a >= 1e9) return +(v / 1e9).toFixed(2) + "G";
    if (a >= 1e6) return +(v / 1e6).toFixed(2) + "M";
    if (a >= 1e4) return +(v / 1e3).toFixed(1) + "k";
    if (a !== 0 && a < 1e-3) return (+v.toPrecision(3)).toExponential();
    return String(+v.toFixed(4));
  };
  const clock = (s) => {
    s = Math.round(s * 10) / 10;
    if (s < 60) return `${+s.toFixed(1)} s`;
    const days = Math.floor(s / 86400), hours = Math.floor((s % 86400) / 3600), minutes = Math.floor((s % 3600) / 60);
    if (days) return hours ? `${days} d ${hours} h` : `${days} d`;
    if (hours) return minutes ? `${hours} h ${minutes} min` : `${hours} h`;
    return s % 60 >= 1 ? `${minutes} min ${Math.round(s % 60)} s` : `${minutes} min`;
  };
  const seconds = (s) => (s < 100 ? `${s.toFixed(s < 10 ? 2 : 1)} s` : clock(s));
  const chip = (color) => h("span", { class: "chip", style: { background: color }, "aria-hidden": "true" });
  const runColor = (i) => css(i === 0 ? "--accent" : `--run-${((i - 1) % 7) + 1}`);
  const several = () => data.runs.length > 1;

  const PARTS = [
    ["forward", "forward", "--accent"], ["backward", "backward", "--accent-2"], ["optimizer", "optimizer", "--accent-3"],
    ["other", "rest of the loop", "--grey"], ["communication", "communication", "--teal"],
    ["wait", "wait for slower ranks", "--warm"], ["data", "data wait", "--amber"], ["evaluation", "evaluation", "--rose"],
    ["checkpoint", "checkpoint", "--violet"], ["step", "whole step", "--accent"],
  ].map(([name, text, color]) => [name, t(text), color]);
  const GOODPUT = {
    compute: "--accent", program: "--grey-2", communication: "--teal", "data wait": "--amber", checkpoint: "--violet",
    init: "--grey", restart: "--rose", "lost steps": "--bad", detection: "--warm", end: "--grey-2",
  };

  // ---- plots
  // A centered average, which does not lag behind the values. The window is 3 % of the plot.
  const smoothed = (values) => {
    const known = values.map((v, i) => i).filter((i) => values[i] !== null && values[i] !== undefined);
    if (!state.smooth || known.length < 60) return null;
    const half = Math.max(2, Math.round(known.length * 0.015)), found = values.slice();
    known.forEach((place, k) => {
      const reach = Math.min(half, k, known.length - 1 - k);
      let sum = 0;
      for (let j = k - reach; j <= k + reach; j++) sum += values[known[j]];
      found[place] = sum / (2 * reach + 1);
    });
    return found;
  };
  const alpha = (color, share) => `color-mix(in srgb, ${color} ${share}%, transparent)`;

  // A table is {x: [...], columns: [{label, values, color, width, fill, isQuiet, band}]}; those of several runs are joined.
  const join = (tables) => {
    for (const table of tables) for (const column of table.columns) column.x = table.x;
    if (tables.length === 1) return [[tables[0].x, ...tables[0].columns.map((c) => c.values)], tables[0].columns];
    const joined = uPlot.join(tables.map((t) => [t.x, ...t.columns.map((c) => c.values)]));
    return [joined, tables.flatMap((t) => t.columns)];
  };
  const valueAt = ({ x, values, raw = values }, wanted) => {
    let low = 0, high = x.length - 1;
    while (low < high) { const middle = (low + high) >> 1; if (x[middle] < wanted) low = middle + 1; else high = middle; }
    const index = low && wanted - x[low - 1] < x[low] - wanted ? low - 1 : low;
    for (let away = 0; away < x.length; away++) {
      for (const i of [index - away, index + away]) if (raw[i] !== null && raw[i] !== undefined) return raw[i];
    }
    return null;
  };

  const drawPlot = (panel, tables, options) => {
    const [table, columns] = join(tables);
    const box = panel.querySelector(".plot"), readout = panel.querySelector(".readout");
    const bands = [];
    columns.forEach((column, i) => { if (column.band) bands.push({ series: columns[i + 1]?.isLow ? [i + 1, i + 2] : [i + 1, i], fill: alpha(column.color, 16) }); });
    const grid = { stroke: css("--grid"), width: 1 };
    const axis = { stroke: css("--faint"), grid, ticks: { show: false }, font: '11px Inter, system-ui, "Liberation Sans", sans-serif' };
    const measured = document.createElement("canvas").getContext("2d");
    measured.font = axis.font;
    const extent = [table[0][0], table[0][table[0].length - 1]];
    const plot = new uPlot({
      width: Math.max(120, box.clientWidth), height: Math.max(100, box.clientHeight), legend: { show: false },
      cursor: { y: false, points: { show: (u, i) => !columns[i - 1].isQuiet, size: 6 }, drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => { zoomTo(null); return null; } } },
      scales: {
        x: { time: false, range: () => (state.zoom ? [state.zoom[0], state.zoom[1]] : extent[0] === extent[1] ? [extent[0] - 1, extent[1] + 1] : common(extent)) },
        y: { distr: options.canLog && state.log ? 3 : 1, range: options.canLog && state.log ? undefined : (u, low, high) => range(low, options.limit ? Math.min(high, options.limit) : high, options.fromZero) },
      },
      axes: [
        { ...axis, space: 70, size: 26, gap: 4, values: (u, values) => values.map((v) => (state.axis === "step" ? tick(v) : clock(v))) },
        { ...axis, space: 34, gap: 6, values: (u, values) => values.map(tick),
          size: (u, values) => 14 + Math.ceil(Math.max(0, ...(values || []).map((v) => measured.measureText(v).width))) },
      ],
      series: [{}, ...columns.map((c) => ({ label: c.label, stroke: c.stroke ?? c.color, width: c.width ?? 1.5, fill: c.fill, dash: c.dash, points: { show: c.hasPoints || c.values.length === 1, size: c.hasPoints ? 6 : 5, fill: c.color }, spanGaps: true }))],
      bands,
      hooks: {
        setSelect: [(u) => { if (u.select.width > 4) zoomTo([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]); u.setSelect({ width: 0, height: 0, left: 0, top: 0 }, false); }],
      },
    }, table, box);
    const shown = columns.filter((c) => !c.isQuiet);
    const read = (index) => {
      const x = table[0][index ?? table[0].length - 1], parts = [];
      const value = (column) => h("b", {}, short(valueAt(column, x)));
      if (options.keys) options.keys.replaceChildren(...(options.isOverlay ? shown : shown.toReversed()).map((column) => h("li", {}, chip(column.color), column.label, index === null ? null : value(column))));
      if (index !== null) parts.push(state.axis === "step" ? `step ${Math.round(x).toLocaleString("en")}  ` : `${clock(x)}  `);
      for (const column of options.keys ? [] : shown) parts.push(shown.length > 1 ? chip(column.color) : "", value(column));
      readout.replaceChildren(...parts);
    };
    const entry = { plot, read, box, table };
    plots.push(entry);
    read(null);
    box.addEventListener("keydown", (event) => keyed(event, entry));
    box.addEventListener("mousemove", () => moved(plot));
    box.addEventListener("mouseleave", () => { cancelAnimationFrame(frame); show(null); });
    box.addEventListener("blur", () => show(null));
    new ResizeObserver(() => {
      if (box.clientWidth && (box.clientWidth !== plot.width || box.clientHeight !== plot.height)) plot.setSize({ width: box.clientWidth, height: box.clientHeight });
    }).observe(box);
  };
  const range = (low, high, fromZero) => {
    if (low === null || low === undefined) return [0, 1];
    if (fromZero && low >= 0) return [0, high > 0 ? high * 1.08 : 1];
    const pad = (high - low) * 0.07 || Math.abs(high) * 0.1 || 1;
    return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
  };
  // All plots show the same steps, so that they can be read one below the other.
  const common = (extent) => {
    const ends = data.runs.filter((run) => run.x).map((run) => run.x[state.axis]);
    const low = ends.map((x) => x.find((v) => v !== null)), high = ends.map((x) => x.findLast((v) => v !== null));
    return [Math.min(extent[0], ...low), Math.max(extent[1], ...high)];
  };
  const zoomTo = (zoom) => {
    state.zoom = zoom;
    for (const { plot } of plots) plot.setScale("x", { min: 0, max: 1 }); // `range` of the scale chooses the values
  };
  const show = (x) => {
    for (const entry of plots) {
      if (x === null) { entry.plot.setCursor({ left: -10, top: -10 }); entry.read(null); continue; }
      const [low, high] = [entry.table[0][0], entry.table[0][entry.table[0].length - 1]];
      if (x < low || x > high) { entry.plot.setCursor({ left: -10, top: -10 }); entry.read(null); continue; }
      entry.plot.setCursor({ left: entry.plot.valToPos(x, "x"), top: 10 });
      entry.read(entry.plot.valToIdx(x));
    }
  };
  const moved = (plot) => {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => { if (plot.cursor.left >= 0 && typeof plot.cursor.idx === "number") show(plot.data[0][plot.cursor.idx]); });
  };
  const keyed = (event, { plot, table }) => {
    const [low, high] = [plot.scales.x.min, plot.scales.x.max];
    const xs = table[0], at = plot.cursor.idx;
    const first = plot.valToIdx(low), last = plot.valToIdx(high);
    const stride = event.shiftKey ? Math.max(1, Math.round((last - first) / 20)) : 1;
    const current = plot.cursor.left < 0 || at === null ? null : at;
    const to = { ArrowRight: current === null ? first : Math.min(last, current + stride), ArrowLeft: current === null ? last : Math.max(first, current - stride), Home: first, End: last }[event.key];
    const x = current === null ? (low + high) / 2 : xs[current];
    if (to !== undefined) show(xs[to]);
    else if (event.key === "+" || event.key === "=") zoomTo([x - (x - low) / 2, x + (high - x) / 2]);
    else if (event.key === "-") { const full = common([xs[0], xs[xs.length - 1]]); const next = [Math.max(full[0], x - (x - low) * 2), Math.min(full[1], x + (high - x) * 2)]; zoomTo(next[0] <= full[0] && next[1] >= full[1] ? null : next); }
    else if (event.key === "Escape" || event.key === "0") { zoomTo(null); show(null); }
    else return;
    event.preventDefault();
  };

  // ---- panels
  const panel = (id, title, { hint, cls = "", note } = {}) => h("article", { class: `panel ${cls}`, id: `panel-${id}` },
    h("header", {}, h("h3", {}, title, hint ? h("small", {}, hint) : null), h("p", { class: "readout" })),
    h("div", { class: "plot", id: `plot-${id}`, tabindex: "0", role: "application", "aria-label": t("{title}. Arrow keys read values, + and - zoom, Escape shows everything.", { title }) }),
    note ? h("p", { class: "panel-note" }, note) : null);
  const missingPanel = (id, title, why, cls = "") => h("article", { class: `panel missing ${cls}`, id: `panel-${id}` }, h("h3", {}, title), h("p", {}, why));
  const finiteX = (x, values) => {
    const keep = x.map((v, i) => (v === null ? -1 : i)).filter((i) => i >= 0);
    return keep.length === x.length ? [x, values] : [keep.map((i) => x[i]), values.map((column) => keep.map((i) => column[i]))];
  };
  const letter = (i) => String.fromCharCode(65 + (i % 26));
  const label = (i) => (several() ? letter(i) : "");

  const lineTables = (name) => data.runs.flatMap((run, i) => {
    const found = run.series[name];
    if (!found) return [];
    const color = runColor(i);
    const spread = Array.isArray(found) ? null : found;
    let [x, [mean, least, most]] = finiteX(run.x[state.axis], spread ? [spread.mean, spread.least, spread.most] : [found, found, found]);
    const soft = spread && smoothed(mean);
    const columns = [{ label: label(i), values: soft || mean, raw: mean, color, width: 1.75 }];
    if (spread && soft && !several()) columns.unshift({ label: "", values: mean, color: alpha(color, 35), width: 1, isQuiet: true });
    if (spread && !several()) columns.unshift(
      { label: "", values: most, color, stroke: "transparent", width: 0, isQuiet: true, band: true }, { label: "", values: least, color, stroke: "transparent", width: 0, isQuiet: true, isLow: true });
    return [{ x, columns }];
  });
  const metricTables = (name) => data.runs.flatMap((run, i) => {
    const found = run.metrics.find((metric) => metric.name === name);
    if (!found) return [];
    const order = found.x[state.axis].map((v, k) => [v, found.y[k]]).filter(([v]) => v !== null).sort((a, b) => a[0] - b[0]).filter(([v], k, all) => k + 1 === all.length || v !== all[k + 1][0]);
    return [{ x: order.map(([v]) => v), columns: [{ label: label(i), values: order.map(([, v]) => v), color: runColor(i), width: 1.75 }] }];
  });
  const why = (name) => data.runs.map((run) => run.missing[name]).find(Boolean) || "";

  const lines = (grid, id, title, options = {}) => {
    const tables = options.isMetric ? metricTables(id) : lineTables(id);
    const name = options.isMetric ? `metric-${id.replace(/[^\w-]/g, "_")}` : id;
    if (!tables.some((t) => t.x.length)) return grid.append(missingPanel(name, title, why(id) || why("metrics"), options.missingClass));
    const node = panel(name, title, options);
    grid.append(node);
    drawPlot(node, tables.filter((t) => t.x.length), options);
  };

  // Losses of evaluations are drawn over the training loss, with a point for each evaluation.
  const lossPlot = (grid, isLogged, isOver) => {
    const training = isLogged ? metricTables("loss") : lineTables("loss");
    const names = [...new Set(data.runs.flatMap((run) => run.metrics.filter(isOver).map((metric) => metric.name)))];
    const others = names.flatMap((name, k) => metricTables(name).map((table) => {
      const [column] = table.columns, color = several() ? column.color : css(["--warm", "--teal", "--violet"][k % 3]);
      return { ...table, columns: [{ ...column, label: `${name} ${column.label}`.trim(), color, hasPoints: true, dash: several() ? [5, 4] : undefined }] };
    }));
    for (const { columns } of training) for (const column of columns) if (!column.isQuiet) column.label = `${t("training loss")} ${column.label}`.trim();
    const tables = [...training, ...others].filter((table) => table.x.length);
    if (!tables.length) return grid.append(missingPanel("loss", t("Loss"), why("loss") || why("metrics"), "wide"));
    const keys = others.length ? h("ul", { class: "keys" }) : undefined;
    const what = isLogged ? t("The training loss is the one that the program has logged.") : t("The training loss is the mean over the ranks of the loss that is passed to backward, at each step.");
    const average = !isLogged && tables.some((table) => table.columns.some((column) => column.isQuiet && !column.isLow && !column.band)) ? ` ${t("The strong line is its moving average, the faint one its values.")}` : "";
    const node = panel("loss", t("Loss"), { hint: isLogged ? t("as logged") : t("mean over ranks"), cls: "wide tall", note: what + average });
    if (keys) node.querySelector(".plot").after(keys);
    grid.append(node);
    drawPlot(node, tables, { canLog: true, keys, isOverlay: true });
  };

  const partsPlot = (grid) => {
    const run = data.runs[state.run], parts = run.series.parts;
    if (!parts) return grid.append(missingPanel("parts", t("Time of a step by phase"), run.missing.parts || "", "wide"));
    const chosen = PARTS.filter(([name]) => parts[name]);
    const node = panel("parts", t("Time of a step by phase"), { hint: t("ms, mean over ranks"), cls: "wide tall" });
    const keys = h("ul", { class: "keys" });
    node.append(keys);
    grid.append(node);
    const [x, raw] = finiteX(run.x[state.axis], chosen.map(([name]) => parts[name]));
    let sum = x.map(() => 0);
    const columns = raw.map((values, i) => {
      sum = sum.map((s, k) => (values[k] === null || s === null ? null : s + values[k]));
      const color = css(chosen[i][2]);
      return { label: chosen[i][1], values: sum, raw: values, color, stroke: color, fill: color, width: 0 };
    }).reverse();
    // A stall or an evaluation takes as long as thousands of steps, and would hide them.
    const totals = sum.filter((v) => v !== null).sort((a, b) => a - b);
    const usual = 1.5 * (totals[Math.floor(totals.length * 0.9)] || 0), most = totals[totals.length - 1] || 0;
    const limit = most > 1.5 * usual ? usual : 0;
    if (limit) node.append(h("p", { class: "panel-note" }, t("Peaks are cut off; the highest is {time} per step.", { time: seconds(most / 1e3) })));
    drawPlot(node, [{ x, columns }], { fromZero: true, keys, limit });
  };

  const memoryPlot = (grid) => {
    const run = data.runs[state.run], ranks = run.ranks;
    if (run.missing.memory) return grid.append(missingPanel("memory", t("Memory"), run.missing.memory));
    const known = ranks.memory.flat().filter((v) => v !== null);
    const isGB = Math.max(...known.slice(0, 20000)) >= 4096;
    const rows = ranks.memory.map((row) => row.map((v) => (v === null ? null : isGB ? v / 1024 : v)));
    const node = panel("memory", t("Memory by rank"), { hint: isGB ? "GB" : "MB", cls: ranks.ids.length > 1 ? "full" : "" });
    const keys = ranks.ids.length > 1 ? h("ul", { class: "keys" }) : null;
    if (keys) node.append(keys);
    grid.append(node);
    const [x, values] = finiteX(ranks.x[state.axis], rows);
    const from = css("--accent"), to = css("--teal");
    let columns;
    if (values.length <= 16) {
      columns = values.map((row, i) => ({ label: values.length > 1 ? `rank ${ranks.ids[i]}` : "", values: row, raw: row, color: `color-mix(in oklab, ${to} ${values.length > 1 ? (100 * i) / (values.length - 1) : 0}%, ${from})` }));
    } else {
      const top = ranks.max_memory.reduce((best, v, i) => (v > ranks.max_memory[best] ? i : best), 0);
      const over = (pick) => x.map((_, k) => { const all = values.map((row) => row[k]).filter((v) => v !== null).sort((a, b) => a - b); return all.length ? pick(all) : null; });
      const middle = over((all) => all[all.length >> 1]);
      columns = [{ label: "", values: over((all) => all[all.length - 1]), color: from, stroke: "transparent", isQuiet: true, band: true }, { label: "", values: over((all) => all[0]), color: from, stroke: "transparent", isQuiet: true, isLow: true },
        { label: t("median"), values: middle, raw: middle, color: from }, { label: t("rank {rank} (largest)", { rank: ranks.ids[top] }), values: values[top], raw: values[top], color: css("--warm") }];
      node.append(h("p", { class: "panel-note" }, t("The area shows the range over {number} ranks.", { number: values.length })));
    }
    drawPlot(node, [{ x, columns: keys ? columns.reverse() : columns }], { fromZero: true, keys });
  };

  const heatMap = (grid) => {
    const run = data.runs[state.run], ranks = run.ranks;
    const title = t("Stragglers");
    if (run.missing.stragglers) return grid.append(missingPanel("stragglers", title, run.missing.stragglers));
    const rows = ranks.own, number = rows.length, width = rows[0].length;
    // Of two ranks, the median is the faster one's time, so that the slower one can be seen.
    const medians = rows[0].map((_, k) => { const all = rows.map((row) => row[k]).filter((v) => v !== null).sort((a, b) => a - b); return all.length ? all[(all.length - 1) >> 1] : null; });
    const rowHeight = Math.max(2, Math.min(34, Math.floor(272 / number)));
    const canvas = h("canvas", { width, height: number, style: { height: `${rowHeight * number}px` }, "aria-hidden": "true" });
    const context = canvas.getContext("2d");
    const parse = (name) => { context.fillStyle = css(name); const v = context.fillStyle; return [1, 3, 5].map((i) => parseInt(v.slice(i, i + 2), 16)); };
    const low = parse("--accent-wash"), high = parse("--warm");
    const image = context.createImageData(width, number);
    rows.forEach((row, i) => row.forEach((v, k) => {
      const share = v === null || !medians[k] ? 0 : Math.max(0, Math.min(1, (v / medians[k] - 1) / 0.5));
      for (let c = 0; c < 3; c++) image.data[4 * (i * width + k) + c] = low[c] + (high[c] - low[c]) * share;
      image.data[4 * (i * width + k) + 3] = v === null ? 0 : 255;
    }));
    context.putImageData(image, 0, 0);
    const readout = h("p", { class: "readout", "aria-live": "polite" });
    const steps = ranks.x[state.axis];
    let cell = null;
    const tell = () => {
      const [i, k] = cell, v = rows[i][k];
      const at = state.axis === "step" ? `step ${short(steps[k])}` : clock(steps[k] || 0);
      readout.replaceChildren(`rank ${ranks.ids[i]}, ${at}  `, h("b", {}, `${short(v)} ms`), v && medians[k] ? t(" (median {value})", { value: short(medians[k]) }) : "");
    };
    const body = h("div", { class: "heat-body", id: "heat", tabindex: "0", role: "application", "aria-label": t("Own time of each rank per step, compared with the median. Arrow keys read values."),
      onmousemove: (event) => { const r = canvas.getBoundingClientRect(); cell = [Math.max(0, Math.min(number - 1, Math.floor(((event.clientY - r.top) / r.height) * number))), Math.max(0, Math.min(width - 1, Math.floor(((event.clientX - r.left) / r.width) * width)))]; tell(); },
      onkeydown: (event) => {
        const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
        if (!move) return;
        event.preventDefault();
        cell = cell ? [Math.max(0, Math.min(number - 1, cell[0] + move[0])), Math.max(0, Math.min(width - 1, cell[1] + move[1]))] : [0, 0];
        tell();
      } }, canvas);
    const shown = number <= 24 ? ranks.ids : ranks.ids.filter((_, i) => i % Math.ceil(number / 12) === 0);
    grid.append(h("article", { class: "panel wide", id: "panel-stragglers" },
      h("header", {}, h("h3", {}, title, h("small", {}, t("own time of a step against the median of the ranks"))), readout),
      h("div", { class: "heat" }, h("div", { class: "heat-ranks", "aria-hidden": "true" }, shown.map((id) => h("span", {}, String(id)))), body),
      h("p", { class: "panel-note" }, run.verdict ? h("strong", {}, `${run.verdict}. `) : t("No rank made the others wait for a tenth of a step or longer. "),
        t("median"), h("span", { class: "scale", style: { background: `linear-gradient(90deg, ${css("--accent-wash")}, ${css("--warm")})` } }), t("+50 % and more"))));
  };

  const rankBars = (grid) => {
    const run = data.runs[state.run], ranks = run.ranks;
    if (!ranks || !Object.keys(ranks.parts).length) return grid.append(missingPanel("ranks", t("Time of a step by rank"), run.missing.parts || ""));
    const chosen = PARTS.filter(([name]) => ranks.parts[name]);
    const totals = ranks.ids.map((_, i) => chosen.reduce((sum, [name]) => sum + (ranks.parts[name][i] || 0), 0));
    const most = Math.max(...totals);
    const rows = ranks.ids.map((id, i) => h("tr", {}, h("th", { scope: "row" }, String(id)),
      h("td", { class: "bar-cell" }, h("div", { class: "rank-bar", style: { width: `${(100 * totals[i]) / most}%` }, role: "img", "aria-label": chosen.map(([name, text]) => `${text} ${short(ranks.parts[name][i])} ms`).join(", "), title: chosen.map(([name, text]) => `${text} ${short(ranks.parts[name][i])} ms`).join("\n") },
        chosen.map(([name, , color]) => h("div", { style: { flex: `${ranks.parts[name][i] || 0} 0 0`, background: css(color) } })))),
      h("td", { class: "num" }, `${short(totals[i])} ms`)));
    grid.append(h("article", { class: "panel", id: "panel-ranks" }, h("header", {}, h("h3", {}, t("Time of a step by rank"), h("small", {}, t("mean of the run")))),
      h("div", { class: "ranks", tabindex: rows.length > 14 ? "0" : null, role: rows.length > 14 ? "region" : null, "aria-label": rows.length > 14 ? t("Time of a step by rank") : null }, h("table", { class: "rank-table" }, h("thead", { class: "visually-hidden" }, h("tr", {}, [t("rank"), t("phases"), t("time")].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))),
      h("ul", { class: "keys" }, chosen.map(([, text, color]) => h("li", {}, chip(css(color)), text)))));
  };

  // ---- time line and goodput
  const SHAPES = { failure: "M4 4l9 9M13 4l-9 9", stall: "M8.5 2.5v8M8.5 13.2v.8", straggler: "M8.5 3l6 10.5h-12z", restart: "M13.5 8.5a5 5 0 1 1-1.6-3.7M12.2 1.6v3.4H8.8", preemption: "M5.5 3.5v10M11.5 3.5v10", end: "M3.5 9l3.5 3.5 7-8", stop: "M5 5h7v7H5z" };
  const icon = (kind) => {
    const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
    for (const [name, value] of Object.entries({ viewBox: "0 0 17 17", width: 17, height: 17, "aria-hidden": "true" })) svg.setAttribute(name, value);
    for (const [name, value] of Object.entries({ d: SHAPES[kind] || "M8.5 8.5m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0", fill: "none", stroke: "currentColor", "stroke-width": 2.2, "stroke-linecap": "round", "stroke-linejoin": "round" })) path.setAttribute(name, value);
    svg.append(path);
    return svg;
  };
  const timeLine = (run, i, length) => {
    const line = run.timeline;
    const at = (s) => `${(100 * s) / length}%`;
    const text = h("p", { class: "event-text", "aria-live": "polite" });
    const count = (number, one, many) => t(number === 1 ? one : many, { number });
    const counts = [count(line.attempts.length, "{number} start", "{number} starts"), count(line.num_checkpoints, "{number} checkpoint", "{number} checkpoints"), count(line.num_events, "{number} other event", "{number} other events")];
    const idle = `${counts.join(", ")}. ${t("Point at a mark, or move to it with Tab.")}`;
    text.textContent = idle;
    // Marks that would cover each other move apart.
    const apart = (100 * 19) / Math.max(280, Math.min(window.innerWidth, 1320) - 90);
    const places = line.events.map(([time]) => (100 * time) / length);
    for (let k = 1; k < places.length; k++) places[k] = Math.max(places[k], places[k - 1] + apart);
    for (let k = places.length - 1, most = 100; k >= 0; k--, most = places[k + 1] - apart) places[k] = Math.max(0, Math.min(places[k], most));
    const mark = (cls, time, words, child, left = at(time)) => {
      const tell = () => { text.textContent = `${clock(time)}: ${words}`; };
      const rest = () => { text.textContent = idle; };
      return h("button", { class: cls, type: "button", style: { left }, "aria-label": `${clock(time)}: ${words}`, onmouseenter: tell, onfocus: tell, onmouseleave: rest, onblur: rest, onclick: tell }, child);
    };
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
    const step = steps.find((s) => length / s <= 8) || length / 8;
    const ticks = [];
    for (let s = 0; s < length * 0.94; s += step) ticks.push(h("span", { style: { left: at(s) } }, clock(s)));
    ticks.push(h("span", { style: { left: "100%" } }, clock(length)));
    return h("div", { class: "time-run" },
      several() ? h("p", { class: "time-name" }, chip(runColor(i)), `${letter(i)}  ${run.name}`) : null,
      h("div", { class: "lanes", role: "group", "aria-label": t("Time line of {name}", { name: run.name }) },
        line.attempts.map(([from, to, failed, first], k) => [
          h("div", { class: `lane-attempt starting${failed && first >= to ? " failed" : ""}`, style: { left: at(from), width: at(Math.max(0, first - from)) }, title: t("importing, starting ranks") }, (first - from) / length > 0.16 ? h("span", {}, t("importing, starting ranks")) : null),
          first < to ? h("div", { class: `lane-attempt${failed ? " failed" : ""}`, style: { left: at(first), width: at(to - first) } }, (to - first) / length > 0.1 ? h("span", {}, k ? t("training, restart {number}", { number: k }) : t("training")) : null) : null]),
        line.events.map(([time, kind, words], k) => mark(`lane-event ${kind}`, time, words, icon(kind), `${places[k]}%`)),
        line.checkpoints.map(([time, words, duration]) => mark("lane-save", time, duration ? `${words} (${seconds(duration)})` : words))),
      h("div", { class: "ticks", "aria-hidden": "true" }, ticks), text);
  };
  const goodputBar = (run, i) => {
    const { wall_s: wall, parts } = run.goodput;
    const rows = Object.entries(parts).filter(([, s]) => s > 0);
    const order = Object.keys(GOODPUT);
    rows.sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]));
    const sum = rows.reduce((total, [, s]) => total + s, 0);
    const share = (s) => `${((100 * s) / wall).toFixed(1)} %`;
    return h("div", { class: "time-run" },
      several() ? h("p", { class: "time-name" }, chip(runColor(i)), `${letter(i)}  ${run.name}`) : null,
      h("div", { class: "goodput-bar", role: "img", "aria-label": rows.map(([name, s]) => `${t(name)} ${share(s)}`).join(", ") },
        rows.map(([name, s]) => h("div", { title: `${t(name)}: ${seconds(s)} (${share(s)})`, style: { flex: `${s} 0 0`, background: css(GOODPUT[name] || "--grey") } }))),
      h("ul", { class: "goodput-parts" },
        rows.map(([name, s]) => h("li", {}, chip(css(GOODPUT[name] || "--grey")), h("span", { class: "name" }, t(name)), h("span", {}, seconds(s)), h("span", { class: "share" }, share(s)))),
        h("li", { class: "total" }, h("span", { class: "name" }, t("sum = wall time")), h("span", { "data-sum": sum, "data-wall": wall }, seconds(sum)), h("span", { class: "share" }, share(sum)))),
      run.missing["goodput parts"] ? h("p", { class: "panel-note" }, run.missing["goodput parts"]) : null);
  };

  // ---- sections
  const section = (id, title, hint, ...more) => h("section", { id, "aria-labelledby": `${id}-title` }, h("div", { class: "section-head" }, h("h2", { id: `${id}-title` }, title), h("span", { class: "hint" }, hint || ""), ...more));
  const segments = (name, choices, current, choose) => h("div", { class: "segments", role: "group", "aria-label": t(name) }, choices.map(([value, text]) => h("button", { type: "button", id: `choose-${name.replace(/\W/g, "")}-${value}`, "aria-pressed": String(value === current), onclick: () => { choose(value); render(); } }, text)));
  const runChoice = (name) => (several() ? segments(t("run of {name}", { name: t(name) }), data.runs.map((run, i) => [i, letter(i)]), state.run, (i) => { state.run = i; }) : null);
  const outcomeClass = (outcome) => ({ succeeded: "good", running: "live", preempted: "live", failed: "bad", interrupted: "bad" })[outcome] || (outcome.startsWith("ended") ? "bad" : "");

  const failureBox = (run) => {
    const { what, more, step, rank, where, do: advice, traceback, output } = run.failure;
    const row = (name, ...children) => [h("dt", {}, name), h("dd", {}, ...children)];
    const [who, ...lines] = where;
    const at = [rank !== null && rank !== undefined ? who || `rank ${rank}` : null, typeof step === "number" ? t("after step {step}", { step: step.toLocaleString("en") }) : null].filter(Boolean).join(", ");
    return h("section", { class: "why", role: "alert", "aria-label": t("Why it failed") },
      h("h2", {}, icon("failure"), several() ? `${t("Why it failed")}: ${run.name}` : t("Why it failed")),
      h("p", { class: "why-what" }, what), more.map((text) => h("p", { class: "why-more" }, text)),
      h("dl", { class: "facts" }, at ? row(t("Where"), at) : null,
        lines.length ? row(t("Line"), lines.map((text) => h("code", { class: "why-line" }, text))) : null,
        row(t("What to do"), advice.map((text) => h("span", { class: "why-advice" }, text)))),
      traceback ? h("details", { open: !output && traceback.split("\n").length <= 12 }, h("summary", {}, t("Traceback of rank {rank}", { rank })), h("pre", { tabindex: "0" }, traceback)) : null,
      output ? h("details", { open: true }, h("summary", {}, t("Last lines that rank {rank} printed", { rank })), h("pre", { tabindex: "0" }, output)) : null);
  };
  const header = (main) => {
    const run = data.runs[0];
    if (several()) {
      main.append(h("div", { class: "head" }, h("h1", {}, t("{number} runs compared", { number: data.runs.length }))),
        h("ul", { class: "runs" }, data.runs.map((one, i) => h("li", {}, chip(runColor(i)), h("strong", {}, `${letter(i)}  ${one.name}`), h("span", { class: `badge ${outcomeClass(one.outcome)}` }, t(one.outcome)), h("code", { class: "sub" }, one.command)))));
    } else {
      const ranks = run.num_ranks ? t(run.num_ranks === 1 ? "{number} process" : "{number} processes", { number: run.num_ranks }) : null;
      const code = run.commit !== "-" ? `${run.branch ? `${run.branch} ` : ""}${run.commit.replace("+", ` ${t("with uncommitted changes")}`)}` : null;
      main.append(h("div", { class: "head" }, h("h1", {}, run.title || run.script.split("/").pop()), h("span", { class: `badge ${outcomeClass(run.outcome)}` }, t(run.outcome)), run.tags.map((tag) => h("span", { class: "badge" }, tag))),
        h("p", { class: "sub" }, [run.began !== "-" ? run.began : null, run.duration !== "-" ? run.duration : null, ranks, code, run.name].filter(Boolean).join(" · ")));
      if (run.command !== "-") main.append(h("div", { class: "command mono" }, run.command));
    }
    for (const one of data.runs) if (one.failure) main.append(failureBox(one));
    for (const one of data.runs) for (const text of one.warnings) main.append(h("p", { class: "warning", role: "alert" }, several() ? `${one.name}: ${text}` : text));
    if (!several() && run.tiles.length) main.append(h("dl", { class: "tiles", id: "tiles" }, run.tiles.map((tile) => h("div", { class: "tile" }, h("dt", {}, tile.name), h("dd", { class: "value" }, tile.value), h("dd", { class: "note" }, tile.note)))));
  };
  const comparison = (main) => {
    const node = section("compare", t("What differs"), t("The first run is the reference; equal settings, versions and facts are left out."));
    const groups = [...new Set(data.comparison.map(([group]) => group))];
    const body = groups.map((group) => [h("tr", { class: "group" }, h("th", { colspan: data.runs.length + 1, scope: "colgroup" }, t(group))),
      ...data.comparison.filter(([one]) => one === group).map(([, name, values, same]) => h("tr", { class: same ? "same" : "differs" }, h("th", { scope: "row" }, t(name)), values.map((value, i) => h("td", { class: i && value !== values[0] ? "other" : "" }, value))))]);
    node.append(h("div", { class: "panel scroll", tabindex: "0", role: "region", "aria-label": t("What differs between the runs") }, h("table", { class: "compare", id: "comparison" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, ""), data.runs.map((run, i) => h("th", { scope: "col" }, chip(runColor(i)), ` ${letter(i)}`, h("br"), run.name)))), h("tbody", {}, body))));
    main.append(node);
  };
  const timeSection = (main) => {
    const node = section("time", t("Where the time went"));
    main.append(node);
    const box = h("article", { class: "panel time", id: "panel-time" });
    node.append(box);
    const length = Math.max(...data.runs.map((run) => (run.timeline ? run.timeline.length : 0)));
    const reason = (run, text) => h("p", { class: "panel-note" }, several() ? `${run.name}: ${text}` : text);
    box.append(h("div", { id: "panel-timeline" }, h("h3", {}, t("Time line")), data.runs.map((run, i) => (run.timeline ? timeLine(run, i, length) : reason(run, run.missing.timeline))),
      h("ul", { class: "keys" }, ["failure", "stall", "restart", "straggler", "preemption", "end", "stop"].filter((kind) => data.runs.some((run) => run.timeline && run.timeline.events.some((event) => event[1] === kind))).map((kind) => h("li", {}, h("span", { class: `lane-event ${kind}`, style: { position: "static", margin: "0" } }, icon(kind)), t(kind))),
        data.runs.some((run) => run.timeline) ? [h("li", {}, chip(css("--grey-2")), t("importing, starting ranks")), h("li", {}, chip(css("--accent-3")), t("training"))] : null,
        data.runs.some((run) => run.timeline && run.timeline.num_checkpoints) ? h("li", {}, chip(css("--violet")), t("checkpoint")) : null)));
    box.append(h("div", { id: "panel-goodput" }, h("h3", { style: { marginBottom: "8px" } }, t("Goodput"), h("small", {}, t("share of the wall time, mean over ranks"))), data.runs.map((run, i) => (run.goodput ? goodputBar(run, i) : reason(run, run.missing.goodput)))));
  };
  const loggedOnce = () => {
    const title = h("header", {}, h("h3", {}, t("Other logged values"), h("small", {}, t("the last of each"))));
    if (!several()) return h("article", { class: "panel", id: "panel-values" }, title, h("dl", { class: "facts" }, data.runs[0].values.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
    const names = [...new Set(data.runs.flatMap((run) => run.values.map(([name]) => name)))];
    const cell = (run, name) => h("td", {}, (run.values.find(([one]) => one === name) || [name, "-"])[1]);
    return h("article", { class: "panel full", id: "panel-values" }, title, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": t("Other logged values") }, h("table", { class: "compare" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, ""), data.runs.map((run, i) => h("th", { scope: "col" }, chip(runColor(i)), ` ${letter(i)}`)))),
      h("tbody", {}, names.map((name) => h("tr", { class: "differs" }, h("th", { scope: "row" }, name), data.runs.map((run) => cell(run, name))))))));
  };
  const training = (main) => {
    const node = section("training", t("Training"), t("Drag over a plot to zoom in on all of them, double-click to zoom out."),
      h("label", { class: "hint", style: { flex: "none", minWidth: "0" } }, h("input", { type: "checkbox", id: "smooth", checked: state.smooth, onchange: (e) => { state.smooth = e.target.checked; render(); } }), t(" smooth")),
      h("label", { class: "hint", style: { flex: "none", minWidth: "0" } }, h("input", { type: "checkbox", id: "log", checked: state.log, onchange: (e) => { state.log = e.target.checked; render(); } }), t(" logarithmic loss")));
    main.append(node);
    const grid = h("div", { class: "grid" });
    node.append(grid);
    const isLogged = !data.runs.some((run) => run.series.loss) && data.runs.some((run) => run.metrics.some((metric) => metric.name === "loss"));
    const isOver = (metric) => metric.isLoss && !(isLogged && metric.name === "loss");
    lossPlot(grid, isLogged, isOver);
    lines(grid, "lr", t("Learning rate"), { fromZero: true });
    lines(grid, "grad_norm", t("Gradient norm"), { hint: t("before clipping") });
    const names = [...new Set(data.runs.flatMap((run) => run.metrics.filter((metric) => !isOver(metric)).map((metric) => metric.name)))].filter((name) => !(isLogged && name === "loss"));
    for (const name of names) lines(grid, name, name, { isMetric: true });
    const isEmpty = data.runs.every((run) => !run.values.length);
    if (!names.length && isEmpty) grid.append(missingPanel("metrics", t("Metrics"), why("metrics")));
    if (!isEmpty) grid.append(loggedOnce());
  };
  const speed = (main) => {
    const node = section("speed", t("Speed"), t("Samples and tokens per second count all ranks, without evaluations and checkpoints."), runChoice("speed"));
    main.append(node);
    const grid = h("div", { class: "grid" });
    node.append(grid);
    partsPlot(grid);
    lines(grid, "samples", t("Samples per second"), { fromZero: true, note: data.runs[state.run].mfu });
    lines(grid, "items", t("Tokens per second"), { fromZero: true });
  };
  const rankSection = (main) => {
    const node = section("ranks", t("Ranks"), "", runChoice("ranks"));
    main.append(node);
    const grid = h("div", { class: "grid" });
    node.append(grid);
    heatMap(grid);
    rankBars(grid);
    memoryPlot(grid);
  };
  const configuration = (main) => {
    const run = data.runs[state.run];
    const search = h("input", { type: "search", id: "search", placeholder: t("Search"), "aria-label": t("Search hyperparameters and settings"), value: state.search, oninput: (e) => { state.search = e.target.value; refill(); } });
    const all = h("label", { class: "filter-all" }, h("input", { type: "checkbox", id: "all-settings", checked: state.all, onchange: (e) => { state.all = e.target.checked; refill(); } }), t("show defaults"));
    const node = section("settings", t("Configuration"), "", runChoice("configuration"), h("div", { class: "filter" }, search, all));
    main.append(node);
    const fills = [];
    const refill = () => { for (const fill of fills) fill(); };
    const wanted = ([name, value, origin, isDefault]) => (state.search ? `${name} ${value} ${origin}`.toLowerCase().includes(state.search.toLowerCase()) : state.all || !isDefault);
    const none = (text) => (state.search ? t("Nothing matches.") : text);
    const parameters = h("article", { class: "panel", id: "panel-hyperparameters" }, h("h3", {}, t("Hyperparameters"), h("small", {}, t("what the model was trained with"))));
    node.append(parameters);
    // A list for each origin: the script, TrainingArguments, and what echelon records of the objects that train.
    const origins = [...new Set(run.hyperparameters.map(([, , origin]) => origin))];
    if (!origins.length) parameters.append(h("p", { class: "panel-note" }, run.missing.hyperparameters));
    for (const origin of origins) {
      const list = h("dl", { class: "parameters" });
      fills.push(() => {
        const found = run.hyperparameters.filter((row) => row[2] === origin && wanted(row));
        list.replaceChildren(...found.map(([name, value, , isDefault]) => h("div", { class: isDefault ? "mono default" : "mono" }, h("dt", {}, name), h("dd", {}, value))));
        if (!found.length) list.append(h("div", {}, h("dt", {}, none(t("All have their default values.")))));
      });
      parameters.append(h("h4", {}, origin), list);
    }
    const box = h("article", { class: "panel block", id: "panel-settings" }, h("h3", {}, t("Settings of echelon"), h("small", {}, t("flags, files, environment and code"))));
    node.append(box);
    if (run.missing.settings) box.append(h("p", { class: "panel-note" }, run.missing.settings));
    else {
      const body = h("tbody");
      fills.push(() => {
        const found = run.settings.map(([name, value, origin, lost, isDefault]) => [name, value, lost ? origin + t(" (overrides {values})", { values: lost }) : origin, isDefault]).filter(wanted);
        body.replaceChildren(...found.map(([name, value, origin, isDefault]) => h("tr", { class: isDefault ? "default" : "" }, h("td", { class: "mono" }, name), h("td", { class: "mono" }, value), h("td", {}, origin))));
        if (!found.length) body.append(h("tr", {}, h("td", { colspan: 3 }, none(t("All settings have their default values.")))));
      });
      box.append(h("table", { class: "settings" }, h("thead", {}, h("tr", {}, [t("setting"), t("value"), t("origin")].map((name) => h("th", { scope: "col" }, name)))), body));
    }
    refill();
    const facts = (id, title, rows, reason) => h("article", { class: id === "panel-environment" ? "panel wide" : "panel", id }, h("h3", {}, title), rows.length ? h("dl", { class: "facts" }, rows.flatMap(([name, value]) => [h("dt", {}, t(name)), h("dd", { class: ["command", "folder", "working directory", "git"].includes(name) ? "mono" : "" }, value)])) : h("p", { class: "panel-note" }, reason));
    node.append(h("div", { class: "grid block" }, facts("panel-environment", t("Environment"), run.environment, ""), facts("panel-versions", t("Versions"), run.versions, t("No versions were recorded, because the run has no run.json."))));
  };

  const outputSection = (main) => {
    const run = data.runs[state.run], number = run.output.length;
    state.output = Math.min(state.output, Math.max(0, number - 1));
    const node = section("output", t("Output"), number ? t("The end of what each rank has printed, without secrets.") : "", runChoice("output"),
      number > 1 ? segments("output of", run.output.map(({ rank, stream }, i) => [i, `rank ${rank} ${stream}`]), state.output, (i) => { state.output = i; }) : null);
    main.append(node);
    if (!number) { node.append(missingPanel("output", t("Console log"), run.missing.output)); return; }
    const { text, path, rank, stream } = run.output[state.output];
    node.append(h("article", { class: "panel", id: "panel-output" }, h("h3", {}, `rank ${rank} ${stream}`, h("small", { class: "mono" }, path)), h("pre", { class: "log", tabindex: "0" }, text)));
  };

  const controls = () => {
    document.getElementById("nav").replaceChildren(...[["compare", t("Compare")], ["time", t("Time")], ["training", t("Training")], ["speed", t("Speed")], ["ranks", t("Ranks")], ["output", t("Output")], ["settings", t("Configuration")]].filter(([id]) => id !== "compare" || several()).map(([id, text]) => h("a", { href: `#${id}` }, text)));
    const isDark = root.dataset.theme === "dark";
    document.getElementById("controls").replaceChildren(
      segments("horizontal axis", [["step", t("Steps")], ["time", t("Time")]], state.axis, (axis) => { state.axis = axis; state.zoom = null; }),
      h("button", { class: "button", type: "button", id: "theme", "aria-pressed": String(isDark), "aria-label": t("Dark colors"), title: t("Dark colors"), onclick: () => { root.dataset.theme = isDark ? "light" : "dark"; root.dataset.chosen = ""; render(); } }, moon()));
  };
  const moon = () => {
    const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
    for (const [name, value] of Object.entries({ viewBox: "0 0 16 16", width: 16, height: 20, "aria-hidden": "true" })) svg.setAttribute(name, value);
    path.setAttribute("d", "M8 1.5a6.5 6.5 0 1 0 0 13zM8 2.5a5.5 5.5 0 0 1 0 11");
    path.setAttribute("fill", "currentColor");
    path.setAttribute("fill-rule", "evenodd");
    const ring = document.createElementNS(SVG, "circle");
    for (const [name, value] of Object.entries({ cx: 8, cy: 8, r: 5.8, fill: "none", stroke: "currentColor", "stroke-width": 1.4 })) ring.setAttribute(name, value);
    svg.append(path, ring);
    return svg;
  };

  const render = () => {
    const focused = document.activeElement && document.activeElement.id, at = window.scrollY;
    for (const { plot } of plots) plot.destroy();
    plots = [];
    state.run = Math.min(state.run, data.runs.length - 1);
    controls();
    const main = document.getElementById("main");
    main.style.minHeight = `${main.offsetHeight}px`; // the page must not jump while it is drawn anew
    main.replaceChildren();
    header(main);
    if (several()) comparison(main);
    timeSection(main);
    training(main);
    speed(main);
    rankSection(main);
    outputSection(main);
    configuration(main);
    main.append(h("footer", {}, h("span", {}, t("Written by echelon {version}", { version: data.echelon })), h("span", {}, t("In a plot: "), h("kbd", {}, "←"), " ", h("kbd", {}, "→"), t(" read, "), h("kbd", {}, "+"), " ", h("kbd", {}, "-"), t(" zoom, "), h("kbd", {}, "Esc"), t(" show all"))));
    main.style.minHeight = "";
    if (focused) { const node = document.getElementById(focused); if (node) node.focus({ preventScroll: true }); }
    window.scrollTo({ top: at, behavior: "instant" });
  };

  const media = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => { if (!("chosen" in root.dataset)) root.dataset.theme = media.matches ? "dark" : "light"; };
  media.addEventListener("change", () => { follow(); render(); });
  follow();
  render();

  if (root.dataset.live) {
    const refresh = async () => {
      try {
        const answer = await fetch(root.dataset.live, { cache: "no-store" });
        if (answer.ok) {
          const text = await answer.text();
          if (text !== refresh.last) { refresh.last = text; data = JSON.parse(text); render(); }
        }
      } catch { /* the server is restarting, or has ended: the last data stay */ }
      setTimeout(refresh, 2000);
    };
    setTimeout(refresh, 2000);
  }
})();
