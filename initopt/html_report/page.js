// The page: its first lines, the step that was chosen, and the parts in their order.
function head() {
  const versions = Object.entries(DATA.versions).map(([name, version]) => `${name} ${version}`).join(" · ");
  main.append(h("h1", {}, DATA.title), h("div", { class: "faint" }, versions));
  const missing = DATA.missing ? [`no record of ${rankOr(DATA.missing_ranks)} ${DATA.missing}`] : [];
  const behind = DATA.ranks.filter((row) => row.first_batch === null);
  const some = DATA.sentence !== null && behind.length
    ? [`${count(behind.length, "rank")} did not reach the ${DATA.goal}: see "Ranks"`] : [];
  main.append(...warned([...DATA.labels, ...DATA.warnings, ...missing, ...some]));
  const sum = DATA.summary;
  if (DATA.sentence === null) {
    main.append(h("p", { class: "say" }, `No rank reached its ${DATA.goal}.`));
    main.append(say("Below is what was recorded until each rank stopped. What needs a whole start-up is left out."));
  } else {
    const total = sum.total;
    const ranks = DATA.median_rank === DATA.slowest_rank ? "" :
      ` (median rank ${DATA.median_rank}; slowest, rank ${DATA.slowest_rank}: ` +
      `${seconds(sum.first_batch[DATA.slowest_rank])})`;
    main.append(h("p", { class: "say" }, `${capital(DATA.goal)} after ${seconds(total)}${ranks}`));
    const unknown = DATA.graph === null;
    const meaning = [
      ["work", unknown ? "all steps, as one sequence: this run has no graph"
        : "the longest chain of steps that need each other: make it faster"],
      ["wait", "for slower ranks: remove the meeting, or balance it"],
      ["queue", unknown && sum.queue < SKEW ? "not known without a graph"
        : "the chain stood still behind other steps: overlap them"],
    ];
    main.append(h("p", { class: "faint", id: "sentence" }, DATA.sentence));
    main.append(sumBar(meaning.map(([name]) => [name, sum[name]])));
    main.append(h("div", { class: "parts" }, meaning.map(([name, text]) => [
      h("span", { class: "value" }, seconds(sum[name])), h("strong", {}, name), h("span", {}, text)])));
    const plan = (DATA.lanes[DATA.median_rank] || { panels: [] }).panels[1];
    if (plan && plan.first_batch !== null) {
      main.append(say(`Planned with this graph, nobody waiting: ~${seconds(plan.first_batch)}.`));
    }
    if (sum.core_bound > 0.7 * total) {
      main.append(say(`CPU work that fills all cores of the host for ${seconds(sum.core_bound)}: ` +
        "overlap can't go below that."));
    }
  }
  const notes = new Map((sum.notes || []).map((note) => [note.step ? `${note.step}: ${note.text}` : note.text, note]));
  main.append(...[...notes.keys()].map((text) => say(text)));
  if (DATA.own_cost) main.append(note(`Recording itself cost ${seconds(DATA.own_cost)} of CPU time.`));
}

function sumBar(parts) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  const svg = s("svg", { class: "sum", role: "img",
    "aria-label": parts.map(([name, value]) => `${name} ${seconds(value)}`).join(", ") }, patterns("sum"));
  let x = 0;
  for (const [name, value] of parts) {
    const share = (100 * value) / total, at = { x: `${x}%`, y: 4, width: `${share}%`, height: 22 };
    if (name === "work") svg.append(s("g", { class: "longest" }, s("rect", { ...at, class: "fill" })));
    else if (name === "wait") svg.append(s("rect", { ...at, class: "waiting", fill: "url(#hatch-sum)" }));
    else svg.append(s("line", { x1: `${x}%`, x2: `${x + share}%`, y1: 15, y2: 15, class: "queue" }));
    x += share;
  }
  return svg;
}

function patterns(id) {
  const line = (d) => {
    const path = s("path", { d, fill: "none", "stroke-width": 1.4 });
    path.style.stroke = "var(--faint)";
    return path;
  };
  const point = s("circle", { cx: 3, cy: 3, r: 1.2 });
  point.style.fill = "var(--paper)";
  const ground = s("rect", { width: 6, height: 6 });
  ground.style.fill = "var(--paper)";
  const box = { width: 6, height: 6, patternUnits: "userSpaceOnUse" };
  return s("defs", {},
    s("pattern", { id: `hatch-${id}`, ...box }, ground, line("M-1 1 L1 -1 M0 6 L6 0 M5 7 L7 5")),
    s("pattern", { id: `dots-${id}`, ...box }, point));
}
const asked = h("aside", { id: "asked", hidden: true, "aria-live": "polite", "aria-label": "The chosen step" });
function pick(name, panel, bar, moving) {
  state.step = name;
  const { panels } = lanesOf();
  state.panel = panel || 0;
  state.bar = bar !== undefined ? bar : panels.length ? panels[0].bars.findIndex((one) => one.name === name) : -1;
  const chosen = panels[state.panel] && panels[state.panel].bars[state.bar];
  if (moving && chosen && (chosen.end < state.from || chosen.start > state.to)) {
    const half = (state.to - state.from) / 2;
    return view(chosen.start - half, chosen.start + half);
  }
  refresh();
}

function choose(rank) {
  state.rank = String(rank);
  state.panel = 0;
  state.bar = -1;
  whole();
}

function details() {
  const name = state.step;
  asked.hidden = name === null;
  document.body.classList.toggle("asking", name !== null);
  asked.replaceChildren();
  if (name === null) return;
  const { panels, steps } = lanesOf();
  const facts = [];
  panels.forEach((panel, number) => panel.bars.forEach((bar, place) => {
    const another = number === state.panel && state.bar >= 0 && state.bar !== place;
    if (bar.name !== name || another || facts.length > 8) return;
    const estimate = panel.name === "recorded" ? "" : "~";
    const [, ...more] = (bar.about || "").split("\n");
    const plain = panel.name === "recorded" ? more.filter((line) => !line.startsWith("needs ")) : [];
    facts.push([panel.name, [`${estimate}${seconds(bar.end - bar.start)}, from ${estimate}${seconds(bar.start)} to ` +
      `${estimate}${seconds(bar.end)} on ${bar.lane}`, ...plain].join(" · ")]);
  }));
  if (!recorded().bars.some((bar) => bar.name === name)) facts.unshift(["recorded", `not on rank ${state.rank}`]);
  const row = steps.find((one) => one.step === name);
  if (row && row.slack !== undefined) facts.push(["slack",
    `${seconds(row.slack)}: it may grow by this much before the ` +
    "graph's longest chain grows"]);
  if (row && row.note) facts.push(["note", row.note]);
  const range = Object.hasOwn(DATA.typical, name) ? DATA.typical[name] : null;
  if (range && DATA.ranks.length > 1) facts.push(["work on all ranks", `${seconds(range.least)} at least, ` +
    `${seconds(range.median)} median, ${seconds(range.most)} on rank ${range.slowest}`]);
  const step = DATA.graph && DATA.graph.steps.find((one) => one.name === name);
  if (step) {
    if (step.stage) facts.push(["stage", step.stage]);
    if (step.uses && step.uses.length) facts.push(["uses", step.uses.join(", ")]);
    if (step.call_site) facts.push(["declared", step.call_site]);
    for (const [title, from, to] of [["comes after", 1, 0], ["before", 0, 1]]) {
      const edges = DATA.graph.edges.filter((edge) => edge[from] === name);
      if (edges.length) facts.push([title, edges.slice(0, 30).flatMap((edge, place) => [place ? ", " : "",
        stepButton(edge[to], false), edge[2] === "value" ? "" : ` (${edge[3] || edge[2]})`]).concat(
        edges.length > 30 ? [` and ${edges.length - 30} more`] : [])]);
    }
  }
  asked.append(h("div", { class: "row" }, h("h2", {}, name), h("button", { onclick: () => pick(null), id: "close" },
    "close")),
    h("dl", {}, facts.map(([title, text]) => [h("dt", {}, title), h("dd", {}, text)])));
}

function refresh() {
  for (const draw of redraw) draw();
  for (const button of document.querySelectorAll("button[data-step]")) {
    if (button.dataset.step === state.step) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
}
head();
const nav = h("nav", { "aria-label": "Parts of this page" });
main.append(nav, s("svg", { width: 0, height: 0, "aria-hidden": "true" }, patterns("all")));
if (DATA.sentence === null) ranks();
lanes();
if (DATA.sentence !== null) chain();
graph();
blame();
collectives();
if (DATA.sentence !== null) ranks();
compiled();
imports();
optimized();
advice();
leftOut();
for (const part of main.querySelectorAll("section")) nav.append(h("a", { href: `#${part.id}` },
  part.querySelector("h2").textContent.split(":")[0]));
document.body.append(asked);
redraw.push(details);
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && state.step !== null) pick(null); });
// A closed proof would not be on paper.
addEventListener("beforeprint", () => { for (const one of document.querySelectorAll("details")) one.open = true; });
whole();
document.documentElement.dataset.drawn = "yes";
