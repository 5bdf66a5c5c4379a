"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

/** What the reader looks at, in the address: a page that is loaded again shows the same. */
const chosen = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

function remember(changes) {
  Object.assign(chosen, changes);
  history.replaceState(null, "", "#" + new URLSearchParams(chosen));
}

/** An element; strings become text nodes, so nothing a model wrote is ever markup. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") element.addEventListener("click", value);
    else element.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

function options(select, values, wanted, otherwise, text) {
  select.replaceChildren(...values.map((value) => make("option", { value }, text(value))));
  select.value = values.map(String).includes(String(wanted)) ? wanted : otherwise ?? "";
}

const number = (value, digits = 3) =>
  value === null || value === undefined ? "–" : Number(value).toFixed(digits);

const COLOURS = ["#2456b8", "#c0562b", "#1a7f4b", "#7a3fa0", "#a3861a", "#137f8f", "#b3376f", "#5d6778"];
const CURVES = [
  ["reward", ["reward/mean"]], ["pass@1 on held-out problems", ["eval/pass@1"]],
  ["pass@8 on held-out problems", ["eval/pass@8"]], ["distinct strategies of 8", ["eval/distinct@8"]],
  ["entropy (nats)", ["train/entropy"]], ["KL to the start (nats)", ["train/ref_kl"]],
  ["trainer against engine, mean |Δ log-prob|", ["train/rollout_logprob_gap"]],
  ["length (tokens)", ["rollout/length_mean"]], ["team value (log-det)", ["credit/team_value"]],
  ["cosine of correct rollouts", ["embed/cosine_mean"]], ["Vendi score of correct rollouts", ["eval/vendi"]],
  ["effective rank of correct rollouts", ["eval/effective_rank"]], ["gradient norm", ["train/grad_norm"]],
  ["tokens per second", ["perf/tokens_per_s"]], ["peak memory (GB)", ["perf/memory_peak_gb"]],
];

const labels = [...new Set(DATA.runs.map((run) => run.label))];
const colourOf = (run) => COLOURS[labels.indexOf(run.label) % COLOURS.length];

function bandTraces(runs, name, label) {
  const columns = new Map();
  for (const run of runs) {
    const [steps, values] = run.series[name] || [[], []];
    steps.forEach((step, i) => columns.set(step, [...(columns.get(step) || []), values[i]]));
  }
  const steps = [...columns.keys()].sort((a, b) => a - b);
  const mean = steps.map((s) => columns.get(s).reduce((a, b) => a + b, 0) / columns.get(s).length);
  const colour = colourOf(runs[0]);
  const line = { x: steps, y: mean, name: label, mode: steps.length > 12 ? "lines" : "lines+markers", line: { color: colour } };
  if (runs.length < 2) return [line];
  const low = steps.map((s) => Math.min(...columns.get(s)));
  const high = steps.map((s) => Math.max(...columns.get(s)));
  const edge = { x: steps, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  return [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: colour + "22" }, line];
}

function plot(title, traces, layout) {
  const box = make("div", { class: "plot", "data-title": title });
  byId("plots").append(box);
  Plotly.newPlot(box, traces, {
    title: { text: title, font: { size: 13 } }, margin: { l: 52, r: 12, t: 34, b: 44 },
    xaxis: { title: { text: "step", font: { size: 11 }, standoff: 4 } }, yaxis: { exponentformat: "power" },
    legend: { font: { size: 10 }, traceorder: "normal" }, ...layout,
  }, { displayModeBar: false, responsive: true });
}

function drawCurves() {
  byId("plots").replaceChildren();
  const extra = byId("metric").value;
  const wanted = extra ? [...CURVES, [extra, [extra]]] : CURVES;
  for (const [title, names] of wanted) {
    const name = names.find((n) => DATA.runs.some((run) => (run.series[n] || [[]])[0].length));
    if (!name) continue;
    const traces = byId("bands").checked
      ? labels.flatMap((label) => bandTraces(DATA.runs.filter((run) => run.label === label), name, label))
      : DATA.runs.flatMap((run) => bandTraces([run], name, run.name));
    plot(title, traces, { showlegend: DATA.runs.length > 1 });
  }
  for (const run of DATA.runs) {
    const phases = run.phases.filter((p) => (run.series[`time/${p}_s`] || [[]])[0].length);
    const traces = phases.map((p) => {
      const [x, y] = run.series[`time/${p}_s`];
      return { x, y, name: p, stackgroup: "one", mode: "lines", line: { width: 0.5 } };
    });
    if (traces.length) plot(`seconds of a step by phase: ${run.name}`, traces, { legend: { font: { size: 10 }, traceorder: "reversed" } });
  }
}

function drawRuns() {
  const head = make("tr", {}, ["run", "method", "step", "pass@1", "pass@8", "distinct@8"].map((t) => make("th", {}, t)),
    make("th", { class: "text" }, "could not be read"));
  const rows = DATA.runs.map((run) => {
    const cells = ["pass@1", "pass@8", "distinct@8"].map((name) => {
      const from = run.before[name], to = run.after[name];
      return make("td", {}, to === undefined ? "–" : from === undefined ? number(to) : `${number(from)} → ${number(to)}`);
    });
    return make("tr", {}, make("td", { title: run.folder }, run.name), make("td", {}, run.method),
      make("td", {}, `${run.step} of ${run.steps ?? "?"}${run.finished ? "" : " (not finished)"}`), cells,
      make("td", { class: "text quiet" }, run.skipped.join("\n") || "nothing"));
  });
  byId("runs").replaceChildren(make("div", { class: "scroll" }, make("table", {}, head, rows)));
}

function drawReplay() {
  const parts = DATA.runs.filter((run) => run.replay).map((run) => {
    const kinds = [...new Set(run.replay.flatMap((row) => Object.keys(row.mean_advantage)))];
    const names = ["", "groups with signal", "pairs reordered", "signs changed", ...kinds.map((k) => k.replaceAll("_", " "))];
    return [make("h3", {}, run.name), make("div", { class: "scroll" }, make("table", {},
      make("tr", {}, names.map((name) => make("th", {}, name))),
      run.replay.map((row) => make("tr", {}, make("td", {}, row.label),
        [row.groups_with_signal, row.pairs_reordered, row.signs_changed].map((v) => make("td", {}, number(v))),
        kinds.map((kind) => make("td", {}, number(row.mean_advantage[kind])))))))];
  });
  byId("replays").replaceChildren(...(parts.length ? parts.flat() : [make("p", { class: "quiet" },
    "None yet: python tools/replay_credit.py RUN writes it.")]));
}

const everyMetric = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.series)))].sort();
options(byId("metric"), ["", ...everyMetric], chosen.metric, "", (name) => name || "none");
byId("bands").checked = chosen.bands !== "off";
byId("metric").addEventListener("change", () => { remember({ metric: byId("metric").value }); drawCurves(); });
byId("bands").addEventListener("change", () => { remember({ bands: byId("bands").checked ? "on" : "off" }); drawCurves(); });
drawRuns();
drawCurves();
drawReplay();
