/* The group inspector. */
const runOf = () => DATA.runs[Number(byId("run").value)];
const groupsOf = () => runOf().groups.filter((g) => String(g.step) === byId("step").value);
const brief = (text) => (text.length > 70 ? text.slice(0, 69) + "…" : text);

function fillRuns() {
  options(byId("run"), DATA.runs.map((_, i) => i), chosen.run, 0, (i) => DATA.runs[i].name);
  fillSteps();
}

function fillSteps() {
  const steps = [...new Set(runOf().groups.map((g) => g.step))];
  options(byId("step"), steps, chosen.step, steps.at(-1), (step) => step);
  byId("sampled").textContent = `on this page: ${runOf().sampled}`;
  fillPrompts();
}

function fillPrompts() {
  const ids = groupsOf().map((g) => g.prompt_id);
  options(byId("prompt"), ids, chosen.prompt, ids[0], (id) => brief(groupsOf().find((g) => g.prompt_id === id).prompt));
  drawGroup();
}

function drawGroup() {
  const group = groupsOf().find((g) => g.prompt_id === byId("prompt").value);
  if (!group) return byId("group").replaceChildren(make("p", { class: "quiet" }, "No rollouts were saved."));
  const tokens = make("div", { id: "tokens" });
  const head = ["#", "reward", "credit", "advantage", "tokens", "version", "end"].map((t) => make("th", {}, t));
  const rows = group.rollouts.map((rollout, i) => {
    const right = rollout.reward >= 0.99;
    const verdict = rollout.verdict === "ok" ? "" : ` ${rollout.verdict}`;
    return make("tr", { class: "pick", "data-rollout": i, on: () => { remember({ rollout: i }); drawTokens(group, i, tokens); } },
      make("td", {}, i), make("td", { class: right ? "right" : "wrong" }, `${right ? "✓" : "✗"} ${number(rollout.reward, 2)}${verdict}`),
      make("td", {}, number(rollout.credit)), make("td", {}, number(rollout.advantage)), make("td", {}, rollout.length),
      make("td", {}, rollout.version ?? "–"), make("td", {}, rollout.finish),
      make("td", { class: "text" }, rollout.text + (rollout.cut ? " … (cut here)" : "")));
  });
  const pictures = make("div", { class: "two" });
  byId("group").replaceChildren(
    make("h3", {}, `step ${group.step}, ${group.prompt_id}`), make("div", { class: "question" }, group.prompt),
    make("p", { class: "quiet" }, `reference answer: ${group.answer}${group.rollouts[0].trained ? "" : "; this group did not enter the update"}`),
    make("div", { class: "scroll" }, make("table", { id: "rollouts" }, make("tr", {}, head, make("th", { class: "text" }, "text (click for tokens)")), rows)),
    tokens, duplicates(group), pictures);
  if (group.cosine) drawPictures(group, pictures);
  drawTokens(group, Math.min(chosen.rollout || 0, group.rollouts.length - 1), tokens);
}

function duplicates(group) {
  if (!group.cosine) return make("p", { class: "quiet" }, "No similarities on this page (--no-embed).");
  const list = (title, sets) => make("p", {}, `${title}: `, sets.length
    ? sets.map((set) => make("span", { class: "pair" }, set.join(" = "))) : make("span", { class: "quiet" }, "none"));
  return make("div", {}, make("h3", {}, "Near-duplicates"), list("same text", group.same_text),
    list("same meaning, other words (cosine ≥ 0.95)", group.same_meaning));
}

function drawPictures(group, where) {
  const names = group.rollouts.map((_, i) => String(i));
  const heat = make("div", { class: "square", id: "heat" }), map = make("div", { class: "square", id: "map" });
  where.append(heat, map);
  const small = { margin: { l: 40, r: 10, t: 36, b: 36 } }, still = { displayModeBar: false, responsive: true };
  Plotly.newPlot(heat, [{ type: "heatmap", z: group.cosine, x: names, y: names, zmin: 0, zmax: 1, colorscale: "Blues", reversescale: true }],
    { ...small, title: { text: "cosine of embeddings", font: { size: 13 } }, xaxis: { type: "category" }, yaxis: { type: "category", autorange: "reversed" } }, still);
  const shown = (right) => {
    const places = new Map(); // equal texts lie on one another: one point with all their numbers
    group.rollouts.forEach((r, i) => {
      if ((r.reward >= 0.99) === right) places.set(String(group.axes[i]), [...(places.get(String(group.axes[i])) || []), i]);
    });
    const points = [...places.values()], most = (own) => Math.max(...own.map((i) => Math.abs(group.rollouts[i].advantage)));
    return { x: points.map(([i]) => group.axes[i][0]), y: points.map(([i]) => group.axes[i][1]), text: points.map((own) => own.join(", ")),
      customdata: points.map((own) => own.map((i) => number(group.rollouts[i].advantage)).join(", ")),
      hovertemplate: "%{text}: advantage %{customdata}<extra></extra>",
      mode: "markers+text", textposition: "top center", name: right ? "correct" : "wrong",
      marker: { color: right ? "#1a7f4b" : "#b3372f", size: points.map((own) => 9 + 6 * Math.min(2, most(own))) } };
  };
  Plotly.newPlot(map, [shown(true), shown(false)],
    { ...small, title: { text: "two principal axes; size = |advantage|", font: { size: 13 } }, legend: { orientation: "h" } }, still);
}

const SHADES = {
  surprise: ["how unlikely the token was when it was drawn", (r, t) => -r.logprobs[t] / 4],
  entropy: ["how undecided the policy was there (entropy)", (r, t) => (r.entropies ? r.entropies[t] / 2 : 0)],
};

/** What is known of the entropies of a rollout: runs of earlier versions kept none. */
function entropyNote(rollout) {
  if (rollout.entropies) return null;
  const somewhere = runOf().groups.some((g) => g.rollouts.some((r) => r.entropies));
  return somewhere ? "entropy: none, this group did not enter the update" : "entropy: not stored in this run";
}

function drawTokens(group, i, where) {
  document.querySelectorAll("#rollouts tr.pick").forEach((row, j) => row.classList.toggle("chosen", i === j));
  const rollout = group.rollouts[i], texts = runOf().tokens, [, strength] = SHADES[chosen.shade] || SHADES.surprise;
  const words = rollout.ids.map((id, t) => {
    const text = texts ? texts[id] ?? `#${id}` : `#${id}`;
    const logprob = rollout.logprobs[t], advantage = rollout.token_advantages ? rollout.token_advantages[t] : rollout.advantage;
    const shade = Math.max(0, Math.min(1, strength(rollout, t) || 0));
    const title = `token ${t}, id ${id}: log-prob ${number(logprob, 4)}, p ${logprob === null ? "–" : number(Math.exp(logprob), 4)}, `
      + `entropy ${rollout.entropies ? number(rollout.entropies[t]) : "not stored"}, advantage ${number(advantage)}, `
      + `policy version ${(rollout.versions ? rollout.versions[t] : rollout.version) ?? "–"}`;
    const edge = advantage > 0 ? "#1a7f4b" : advantage < 0 ? "#b3372f" : "transparent";
    return make("span", { class: "token", title, style: `background: rgba(192, 86, 43, ${0.55 * shade}); border-color: ${edge}` }, text);
  });
  const select = make("select", { id: "shade" });
  options(select, Object.keys(SHADES), chosen.shade, "surprise", (name) => SHADES[name][0]);
  select.addEventListener("change", () => { remember({ shade: select.value }); drawTokens(group, i, where); });
  where.replaceChildren(make("h3", {}, `Tokens of rollout ${i}`),
    make("p", { class: "quiet" }, "background: ", select, "; underline: pushed up (green) or down (red); point at a token for its numbers"),
    make("p", { class: "quiet", id: "entropy" }, entropyNote(rollout)),
    make("div", { class: "tokens" }, words.flatMap((word) => [word, " "])));
}

byId("run").addEventListener("change", () => { remember({ run: byId("run").value, rollout: 0 }); fillSteps(); });
byId("step").addEventListener("change", () => { remember({ step: byId("step").value, rollout: 0 }); fillPrompts(); });
byId("prompt").addEventListener("change", () => { remember({ prompt: byId("prompt").value, rollout: 0 }); drawGroup(); });
fillRuns();
if (DATA.refresh_s) setTimeout(() => location.reload(), DATA.refresh_s * 1000);
