"""A page of ``echelon watch --web``: what each rank of a live run is doing, for which it asks once a second."""

from __future__ import annotations

__all__ = ["PAGE"]

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>echelon watch</title>
<style>
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: normal; opacity: .7; }
td, th { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent); }
td.number, th.number { text-align: right; }
tr.stopped, tr.exited, tr.silent, tr.awaited { color: light-dark(#b3261e, #ff8a80); font-weight: 600; }
tr.slow, tr.behind, tr.phase { color: light-dark(#8a5a00, #ffd166); }
svg { width: 100%; height: 8rem; }
svg path { fill: none; stroke: light-dark(#1769aa, #7cc4ff); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
#lost { color: light-dark(#b3261e, #ff8a80); }
progress { width: 100%; }
[hidden] { display: none !important; }
</style>
</head>
<body>
<h1 id="name">echelon watch</h1>
<p id="state" aria-live="polite"></p>
<p id="lost" hidden>The view has ended: start echelon watch --web again.</p>
<progress id="progress" hidden></progress>
<p id="numbers"></p>
<svg id="loss" viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="loss"><path></path></svg>
<p id="why"></p>
<table id="ranks">
<thead><tr><th class="number">rank</th><th class="number">step</th><th>state</th><th>last operation</th>
<th class="number">heartbeat</th><th class="number">memory</th></tr></thead>
<tbody></tbody>
</table>
<ul id="events"></ul>
<script>
"use strict";
const $ = (id) => document.getElementById(id);
const fixed = (value, digits, unit) => (value === null ? "" : value.toFixed(digits) + unit);
const short = (value) => Number(value.toPrecision(4)).toLocaleString("en");
function cell(row, text, isNumber) {
  const td = row.insertCell();
  td.textContent = text;
  if (isNumber) td.className = "number";
}
function drawLoss(losses) {
  const known = losses.filter((loss) => loss !== null);
  $("loss").toggleAttribute("hidden", known.length < 2);
  if (known.length < 2) return;
  const least = Math.min(...known), span = Math.max(...known) - least || 1;
  let path = "", pen = "M";
  losses.forEach((loss, i) => {
    if (loss === null) { pen = "M"; return; }
    path += `${pen}${(100 * i) / (losses.length - 1)},${98 - (96 * (loss - least)) / span}`;
    pen = "L";
  });
  $("loss").firstElementChild.setAttribute("d", path);
}
function draw(run) {
  document.title = `${run.name}: step ${run.step}`;
  $("name").textContent = run.name;
  const machines = run.num_machines > 1 ? ` on ${run.num_machines} machines (here: ${run.host})` : "";
  $("state").textContent = `${run.outcome}, ${Math.round(run.elapsed_s)} s, ${run.num_processes} processes${machines}, ${run.num_restarts} restarts`;
  $("progress").hidden = !run.num_steps;
  if (run.num_steps) { $("progress").max = run.num_steps; $("progress").value = run.step; }
  const numbers = [`step ${run.step.toLocaleString("en")}${run.num_steps ? ` of ${run.num_steps.toLocaleString("en")}` : ""}`];
  for (const [field, label] of [["epoch", "epoch"], ["steps_per_s", "steps/s"], ["samples_per_s", "samples/s"], ["items_per_s", "items/s"],
      ["loss", "loss"], ["lr", "learning rate"], ["grad_norm", "gradient norm"], ["eta_s", "seconds left"]])
    if (run[field] !== null) numbers.push(`${label} ${typeof run[field] === "string" ? run[field] : short(run[field])}`);
  $("numbers").textContent = numbers.join(" \\u00b7 ");
  $("why").textContent = run.why_not_live;
  drawLoss(run.losses);
  const body = document.createElement("tbody");
  for (const rank of run.rows) {
    const row = body.insertRow();
    row.className = rank.difference;
    cell(row, rank.rank, true);
    cell(row, rank.step === null ? "" : rank.step.toLocaleString("en"), true);
    cell(row, [...new Set([rank.what, rank.phase, rank.difference !== "none" && rank.place ? `at ${rank.place.split("/").pop()}` : ""])].filter(Boolean).join("; "));
    cell(row, rank.operation);
    cell(row, fixed(rank.heartbeat_s, 1, " s"), true);
    cell(row, fixed(rank.memory_mb, 0, " MB"), true);
  }
  $("ranks").replaceChild(body, $("ranks").tBodies[0]);
  $("events").replaceChildren(...run.events.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
}
async function update() {
  try {
    const answer = await fetch("ranks.json" + location.search);
    if (!answer.ok) throw new Error(answer.status);
    draw(await answer.json());
    $("lost").hidden = true;
  } catch { $("lost").hidden = false; }
  setTimeout(update, 1000);
}
update();
</script>
</body>
</html>
"""
