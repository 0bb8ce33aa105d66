"use strict";
(() => {
// What a run says is only ever put in as text, never as markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SKEW = 0.005;
const UNNAMED = "(not in a step)";
const ROWS = 20;
const main = document.getElementById("page");
const state = { rank: String(DATA.shown_rank), from: 0, to: 1, step: null, panel: 0, bar: -1 };
const redraw = [];

const svgSpace = "http://www.w3.org/2000/svg";
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false && child !== "") node.append(child);
  }
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(svgSpace, tag), attributes, children);

function seconds(value) {
  if (Math.abs(value) < 0.0005) return "0";
  return Math.abs(value) >= 0.9995 ? `${value.toFixed(1)}s` : `${(1000 * value).toFixed(0)}ms`;
}
const dot = (value) => (Math.abs(value || 0) < 0.0005 ? "·" : seconds(value));
const about = (value) => (value === null || value === undefined ? "?" : `~${seconds(Math.max(0, value))}`);
const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

const pen = document.createElement("canvas").getContext("2d");
function wide(text, bold) {
  pen.font = `${bold ? "700 " : ""}12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif`;
  return pen.measureText(text).width;
}
function clipped(text, room) {
  if (wide(text) <= room) return text;
  const letters = Array.from(text.slice(0, 400));
  while (letters.length && wide(letters.join("") + "…") > room) letters.splice(Math.floor(letters.length * 0.9));
  return letters.join("") + "…";
}

function section(id, title, ...children) {
  const made = h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), ...children);
  main.append(made);
  return made;
}
function table(columns, rows, caption) {
  const heads = columns.map(([text, kind]) => h("th", { scope: "col", class: kind }, text));
  const body = h("tbody");
  const made = h("table", { "aria-label": caption }, h("thead", {}, h("tr", {}, heads)), body);
  const more = h("div", { class: "more" });
  let shown = 0;
  // Ten thousand rows at once would make every click slow.
  const grow = (by) => {
    for (const row of rows.slice(shown, shown + by)) body.append(row());
    shown = Math.min(rows.length, shown + by);
    const left = rows.length - shown;
    more.replaceChildren();
    if (left) more.append(h("button", { onclick: () => grow(500) }, `${count(left, "more")}`.replace(/mores$/, "more")));
  };
  grow(ROWS);
  return [h("div", { class: "scroll" }, made), more];
}
const cells = (...values) => values.map((value) => h("td", { class: "number" }, value));
const nameCell = (name, shown) => h("td", { class: name.length > 40 ? "name" : "tight" }, shown);
const longest = () => new Set(recorded().bars.filter((bar) => bar.longest).map((bar) => bar.name));
function stepButton(name, marked) {
  const attributes = { class: marked ? "step longest" : "step", "data-step": name, onclick: () => pick(name) };
  return h("button", attributes, name, marked ? h("span", { title: "on the longest chain" }, " ●") : null);
}
function warned(texts) {
  const lines = texts.map((text) => h("p", { class: "warn" }, `! ${text}`));
  return lines.length <= 10 ? lines : [...lines.slice(0, 8),
    h("details", {}, h("summary", {}, `${lines.length - 8} more warnings`), lines.slice(8))];
}

const lanesOf = () => DATA.lanes[state.rank] || { panels: [], steps: [] };
const recorded = () => lanesOf().panels[0] || { bars: [], lanes: [], queues: [], first_batch: null };
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// ---- the sentence -------------------------------------------------------------------------------------------------
function head() {
  const versions = Object.entries(DATA.versions).map(([name, version]) => `${name} ${version}`).join(" · ");
  main.append(h("h1", {}, DATA.title), h("div", { class: "faint" }, versions));
  const missing = DATA.missing ? [`no record of rank${DATA.missing_ranks.length > 1 ? "s" : ""} ${DATA.missing}`] : [];
  const behind = DATA.ranks.filter((row) => row.first_batch === null);
  const some = DATA.sentence !== null && behind.length
    ? [`${count(behind.length, "rank")} did not reach the ${DATA.goal}: see "Ranks"`] : [];
  main.append(...warned([...DATA.labels, ...DATA.warnings, ...missing, ...some]));
  const sum = DATA.summary;
  if (DATA.sentence === null) {
    main.append(h("p", { class: "say" }, `No rank reached its ${DATA.goal}.`));
    main.append(h("p", {}, "Below is what was recorded until each rank stopped. What needs a whole start-up is left out."));
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
      main.append(h("p", {}, `Planned with this graph, nobody waiting: ~${seconds(plan.first_batch)}.`));
    }
    if (sum.core_bound > 0.7 * total) {
      main.append(h("p", {}, `CPU work that fills all cores of the host for ${seconds(sum.core_bound)}: ` +
        "overlap can't go below that."));
    }
  }
  const notes = new Map((sum.notes || []).map((note) => [note.step ? `${note.step}: ${note.text}` : note.text, note]));
  main.append(...[...notes.keys()].map((text) => h("p", {}, text)));
  main.append(h("p", { class: "faint" }, `Recording itself cost ${seconds(DATA.own_cost)} of CPU time.`));
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

// ---- lanes --------------------------------------------------------------------------------------------------------
const ROW = 42, BAR = 18, UP = 17;
function lanes() {
  const ranks = Object.keys(DATA.lanes);
  const labels = new Map(DATA.ranks.map((row) => [String(row.rank),
    row.first_batch === null ? `rank ${row.rank}, stopped` : `rank ${row.rank}, ${seconds(row.first_batch)}`]));
  const choice = h("select", { "aria-label": "Rank", onchange: () => choose(choice.value) },
    ranks.map((rank) => h("option", { value: rank }, labels.get(rank) +
      (Number(rank) === DATA.median_rank ? " (median)" : Number(rank) === DATA.slowest_rank ? " (slowest)" : ""))));
  redraw.push(() => { choice.value = state.rank; });
  const said = h("span", { class: "faint", "aria-live": "polite" });
  const chart = h("div", { class: "chart", id: "chart", tabindex: 0, role: "group",
    "aria-label": "Lanes over time. Left and right: the step before or after. Up and down: another lane. " +
      "Plus, minus: zoom. Comma, period: earlier, later. 0: all. Escape: no step." });
  const zoomed = (factor) => () => zoom(factor);
  section("lanes", "Lanes over time",
    h("p", { class: "faint" }, "Drag over a part to see more of it, double-click for all; Ctrl and the wheel zoom as well. " +
      "With the chart in focus: arrow keys go from step to step, + and - zoom, comma and period move, 0 shows all."),
    h("div", { class: "tools" }, choice,
      h("button", { onclick: zoomed(0.5), "aria-label": "zoom in", id: "zoom-in" }, "+"),
      h("button", { onclick: zoomed(2), "aria-label": "zoom out" }, "−"),
      h("button", { onclick: () => move(-0.5), "aria-label": "earlier" }, "◂"),
      h("button", { onclick: () => move(0.5), "aria-label": "later" }, "▸"),
      h("button", { onclick: () => whole(), id: "zoom-all" }, "all"), said),
    chart, legend());
  if (ranks.length === 1) choice.disabled = true;
  redraw.push(() => drawLanes(chart, said));
  chart.addEventListener("keydown", keys);
  chart.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(chart, event.clientX));
  }, { passive: false });
  chart.addEventListener("dblclick", whole);
  drag(chart);
  let width = 0;
  new ResizeObserver(() => {
    if (chart.clientWidth === width) return;
    width = chart.clientWidth;
    drawLanes(chart, said);
  }).observe(chart);
}
function legend() {
  const key = (draw, text) => {
    const svg = s("svg", { width: 30, height: 16, "aria-hidden": "true" }, patterns(`key-${text.length}`), draw(text.length));
    return h("span", {}, svg, text);
  };
  const box = (more) => ({ x: 1, y: 2, width: 28, height: 12, ...more });
  return h("div", { class: "legend" },
    key(() => s("g", { class: "longest" }, s("rect", box({ class: "fill" }))), "longest chain (outlined)"),
    key(() => s("rect", box({ class: "fill" })), "other work"),
    key((id) => s("rect", box({ class: "waiting", fill: `url(#hatch-key-${id})` })), "wait for other ranks"),
    key((id) => [s("rect", box({ class: "fill" })), s("rect", box({ fill: `url(#dots-key-${id})` }))], "compile"),
    key(() => s("path", { d: "M1 9 H29", class: "queue" }), "queue: the chain stood still"),
    key(() => s("path", { d: "M15 0 V16", class: "goal" }), DATA.goal));
}
const end = () => Math.max(1e-9, ...lanesOf().panels.flatMap((panel) => [panel.first_batch || 0,
  panel.bars.reduce((last, bar) => Math.max(last, bar.end), 0)])) * 1.02;
function whole() {
  Object.assign(state, { from: 0, to: end() });
  refresh();
}
function view(from, to) {
  const last = end();
  const length = Math.min(last, Math.max(to - from, 1e-4));
  state.from = Math.min(Math.max(0, from), last - length);
  state.to = state.from + length;
  refresh();
}
function zoom(factor, around) {
  const middle = around === undefined ? (state.from + state.to) / 2 : around;
  view(middle - (middle - state.from) * factor, middle + (state.to - middle) * factor);
}
function move(part) {
  const by = (state.to - state.from) * part;
  view(state.from + by, state.to + by);
}
let plot = { left: 0, inner: 1 };
function timeAt(chart, x) {
  const svg = chart.querySelector("svg");
  return state.from + ((x - svg.getBoundingClientRect().left - plot.left) / plot.inner) * (state.to - state.from);
}
function drag(chart) {
  let from = null, box = null;
  chart.addEventListener("pointerdown", (event) => {
    if (event.button || !chart.querySelector("svg")) return;
    from = event.clientX;
  });
  addEventListener("pointermove", (event) => {
    if (from === null) return;
    const svg = chart.querySelector("svg"), edge = svg.getBoundingClientRect().left;
    if (Math.abs(event.clientX - from) < 6 && !box) return;
    if (!box) svg.append(box = s("rect", { class: "range", y: 0, height: svg.getAttribute("height") }));
    box.setAttribute("x", Math.min(from, event.clientX) - edge);
    box.setAttribute("width", Math.abs(event.clientX - from));
  });
  addEventListener("pointerup", (event) => {
    const began = from, drawn = box;
    from = box = null;
    if (began === null || !drawn) return;
    drawn.remove();
    const times = [timeAt(chart, began), timeAt(chart, event.clientX)].sort((a, b) => a - b);
    view(Math.max(state.from, times[0]), Math.min(state.to, times[1]));
    // The click that ends a drag chooses no step.
    chart.dataset.dragged = "1";
    setTimeout(() => delete chart.dataset.dragged, 0);
  });
}
function ticks(from, to, most) {
  const rough = (to - from) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((value) => value >= rough);
  const found = [];
  for (let at = Math.ceil(from / step); at * step <= to; at += 1) found.push(at * step);
  return found.map((at) => [at, step >= 1 ? `${at.toFixed(0)}s` : step >= 0.001 ? `${(1000 * at).toFixed(0)}ms`
    : `${(1000 * at).toFixed(Math.min(6, Math.ceil(-Math.log10(step)) - 3))}ms`]);
}
function drawLanes(chart, said) {
  const { panels } = lanesOf();
  const held = document.activeElement === chart;
  chart.replaceChildren();
  if (!panels.some((panel) => panel.bars.length)) {
    chart.append(h("p", {}, "No step was recorded on this rank."));
    said.textContent = "";
    return;
  }
  const width = Math.max(300, chart.clientWidth - 16);
  const names = panels.flatMap((panel) => panel.lanes);
  const left = Math.min(width / 4, 12 + Math.max(...names.map((name) => wide(name))));
  const inner = width - left - 10;
  plot = { left, inner };
  const x = (time) => left + ((time - state.from) / (state.to - state.from)) * inner;
  const height = panels.reduce((sum, panel) => sum + 26 + ROW * panel.lanes.length, 0) + 26;
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Lanes of rank ${state.rank}; the steps are in the table "Blame"` }, patterns("chart"),
    s("clipPath", { id: "inside" }, s("rect", { x: left, y: 0, width: inner + 10, height })));
  const bottom = height - 22;
  for (const [time, label] of ticks(state.from, state.to, inner / 90)) {
    svg.append(s("path", { d: `M${x(time)} 22 V${bottom}`, class: "rule" }),
      s("text", { x: x(time), y: bottom + 15, "text-anchor": "middle", class: "quiet" }, label));
  }
  let y = 0, thin = 0, bars = 0;
  panels.forEach((panel, number) => {
    const title = panel.name === "recorded" ? `recorded, rank ${state.rank}` : "planned (~): this graph, nobody waiting";
    svg.append(s("text", { x: 0, y: y + 15, class: "strong" }, title));
    const top = y + 24;
    const group = s("g", { "clip-path": "url(#inside)" });
    panel.lanes.forEach((lane, row) => {
      const at = top + ROW * row;
      svg.append(s("text", { x: left - 6, y: at + UP + 13, "text-anchor": "end" }, clipped(lane, left - 8)));
      const drawn = drawLane(group, panel, number, lane, at, x);
      thin += drawn.thin;
      bars += drawn.bars;
    });
    if (panel.first_batch !== null) {
      const goal = x(panel.first_batch);
      const text = `${DATA.goal} ${panel.name === "recorded" ? "" : "~"}${seconds(panel.first_batch)}`;
      group.append(s("path", { d: `M${goal} ${top - 4} V${top + ROW * panel.lanes.length}`, class: "goal" }));
      // Its name may not cover the panel's own.
      if (goal - wide(text) - 6 > wide(title, true) + 8 && goal < width) {
        group.append(s("text", { x: goal - 4, y: y + 15, "text-anchor": "end" }, text));
      } else if (goal >= left && goal < width - wide(text)) {
        group.append(s("text", { x: Math.max(goal, wide(title, true)) + 8, y: y + 15 }, text));
      }
    }
    svg.append(group);
    y += 26 + ROW * panel.lanes.length;
  });
  chart.append(svg);
  if (held) chart.focus({ preventScroll: true });
  const part = `${seconds(state.from)} to ${seconds(state.to)}: ${count(bars, "bar")}`;
  said.textContent = thin ? `${part}; ${count(thin, "more")} thinner than a pixel: zoom in`.replace("mores", "more") : part;
}
function drawLane(group, panel, number, lane, top, x) {
  const at = top + UP;
  let edge = -Infinity, thin = 0, bars = 0, taken = -Infinity, outer = -Infinity;
  const mine = panel.bars.map((bar, place) => [bar, place]).filter(([bar]) => bar.lane === lane && bar.end >= state.from &&
    bar.start <= state.to).sort((a, b) => a[0].start - b[0].start || b[0].end - a[0].end);
  for (const [bar, place] of mine) {
    const left = Math.max(x(bar.start), -50), right = Math.min(x(bar.end), x(state.to) + 50);
    const picked = state.step === bar.name;
    if (right - left < 1 && right - edge < 1 && !picked) { thin += 1; continue; }
    edge = Math.max(edge, right);
    bars += 1;
    // What ran inside of another bar is half as high, so that both are seen.
    const nested = bar.start < outer - 1e-6;
    outer = Math.max(outer, bar.end);
    // A thin bar has no room for an outline: the longest chain stands out by its height.
    const stick = bar.longest && right - left < 4 ? 3 : 0;
    const y = nested ? at + BAR / 2 : at - stick, tall = nested ? BAR / 2 : BAR + 2 * stick;
    const wideBar = Math.max(1, right - left);
    const name = ["bar", bar.longest ? "longest" : "", stick ? "thin" : "", picked ? "picked" : ""].filter(Boolean).join(" ");
    const one = s("g", { class: name, "data-step": bar.name, onclick: () => {
      if (!group.closest("#chart").dataset.dragged) pick(bar.name, number, place);
    } }, s("title", {}, bar.about || bar.name),
    s("rect", { class: "fill", x: left, y, width: wideBar, height: tall, rx: wideBar > 8 ? 2 : 0 }));
    const within = (times, attributes) => {
      const from = Math.max(left, x(times[0])), to = Math.min(right, x(times[1]));
      if (to > from) one.append(s("rect", { x: from, y, width: to - from, height: tall, ...attributes }));
    };
    for (const times of bar.compiles || []) within(times, { fill: "url(#dots-chart)" });
    for (const times of bar.waits || []) within(times, { fill: "url(#hatch-chart)", class: "waiting" });
    for (const times of bar.imports || []) {
      const from = Math.max(left, x(times[0])), to = Math.min(right, x(times[1]));
      if (to - from > 3) one.append(s("path", { d: `M${to} ${y} V${y + tall}`, class: "waiting" }));
      if (to - from > wide(times[2]) + 6) {
        one.append(s("text", { x: (from + to) / 2, y: at + 13, "text-anchor": "middle", class: "within" }, times[2]));
      }
    }
    const seen = [Math.max(left, plot.left), Math.min(right, plot.left + plot.inner)];
    const room = solid(bar, x, seen);
    if (room[1] - room[0] > wide(bar.name, bar.longest) + 8 && !bar.imports && !nested) {
      one.append(s("text", { x: (room[0] + room[1]) / 2, y: at + 13, "text-anchor": "middle",
        class: bar.longest ? "within strong" : "within" }, bar.name));
    } else if (seen[0] > taken + 6 && seen[1] >= plot.left) {
      // What is not named here has its name in the tooltip, in the details and in the table.
      const start = Math.min(seen[0], plot.left + plot.inner - wide(bar.name, bar.longest));
      if (start > taken + 6 && start >= plot.left) {
        one.append(s("text", { x: start, y: at - 4, class: bar.longest ? "strong" : null }, bar.name));
        taken = start + wide(bar.name, bar.longest);
      }
    }
    group.append(one);
  }
  for (const queue of panel.queues.filter((one) => one.lane === lane)) {
    group.append(s("path", { d: `M${x(queue.start)} ${at + BAR + 4} H${x(queue.end)}`, class: "queue" },
      s("title", {}, `${queue.step}: queued ${seconds(queue.end - queue.start)}` +
        (queue.behind && queue.behind.length ? ` behind ${queue.behind.join(", ")}` : ""))));
  }
  return { thin, bars };
}
function solid(bar, x, seen) {
  const edges = [bar.start, ...(bar.waits || []).flat(), bar.end].map(x);
  let best = [0, 0];
  for (let at = 0; at + 1 < edges.length; at += 2) {
    const part = [Math.max(edges[at], seen[0]), Math.min(edges[at + 1], seen[1])];
    if (part[1] - part[0] > best[1] - best[0]) best = part;
  }
  return best;
}
function keys(event) {
  const panel = lanesOf().panels[state.panel];
  const ways = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": whole, ",": () => move(-0.5),
    ".": () => move(0.5), Escape: () => pick(null) };
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: "down", ArrowUp: "up" };
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in ways || event.key in steps) || !panel) return;
  event.preventDefault();
  if (event.key in ways) return ways[event.key]();
  go(steps[event.key]);
}
function go(way) {
  const { panels } = lanesOf();
  const here = panels[state.panel].bars[state.bar];
  const sorted = (number, lane) => panels[number].bars.map((bar, place) => [bar, place])
    .filter(([bar]) => bar.lane === lane).sort((a, b) => a[0].start - b[0].start || b[0].end - a[0].end);
  if (!here) {
    const first = panels.findIndex((panel) => panel.bars.length);
    const [bar, place] = sorted(first, panels[first].lanes[0])[0];
    return pick(bar.name, first, place, true);
  }
  if (way === 1 || way === -1) {
    const row = sorted(state.panel, here.lane);
    const next = row[row.findIndex(([, place]) => place === state.bar) + way];
    return next && pick(next[0].name, state.panel, next[1], true);
  }
  const all = panels.flatMap((panel, number) => panel.lanes.map((lane) => [number, lane]));
  const now = all.findIndex(([number, lane]) => number === state.panel && lane === here.lane);
  const other = all[now + (way === "down" ? 1 : -1)];
  if (!other) return;
  const near = sorted(...other).reduce((best, one) =>
    Math.abs(one[0].start - here.start) < Math.abs(best[0].start - here.start) ? one : best);
  pick(near[0].name, other[0], near[1], true);
}

// ---- one step -----------------------------------------------------------------------------------------------------
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
    if (bar.name !== name || facts.length > 8 || (number === state.panel && state.bar >= 0 && state.bar !== place)) return;
    const estimate = panel.name === "recorded" ? "" : "~";
    const [, ...more] = (bar.about || "").split("\n");
    const plain = panel.name === "recorded" ? more.filter((line) => !line.startsWith("needs ")) : [];
    facts.push([panel.name, [`${estimate}${seconds(bar.end - bar.start)}, from ${estimate}${seconds(bar.start)} to ` +
      `${estimate}${seconds(bar.end)} on ${bar.lane}`, ...plain].join(" · ")]);
  }));
  const row = steps.find((one) => one.step === name);
  if (row && row.slack !== undefined) facts.push(["slack", `${seconds(row.slack)}: it may grow by this much before the ` +
    "graph's longest chain grows"]);
  if (row && row.note) facts.push(["note", row.note]);
  const range = DATA.typical[name];
  if (range && DATA.ranks.length > 1) facts.push(["work on all ranks", `${seconds(range.least)} at least, ` +
    `${seconds(range.median)} median, ${seconds(range.most)} on rank ${range.slowest}`]);
  if (!facts.length) facts.push(["recorded", `not on rank ${state.rank}`]);
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
  asked.append(h("div", { class: "row" }, h("h2", {}, name), h("button", { onclick: () => pick(null), id: "close" }, "close")),
    h("dl", {}, facts.map(([title, text]) => [h("dt", {}, title), h("dd", {}, text)])));
}

// ---- what decided -------------------------------------------------------------------------------------------------
function chain() {
  const made = section("chain", "The chain that decided",
    h("p", { class: "faint" }, "Across ranks, the last step first: @ when it began, + how long it took, ⋯ ready but queued. " +
      "At a meeting the chain goes on at the rank that came last."));
  if (DATA.chain.unknown) return made.append(h("p", {}, DATA.chain.unknown));
  const links = DATA.chain.chain;
  const total = links.length ? links[0].start + links[0].took : 0;
  const shown = links.filter((link) => link.step !== UNNAMED || link.took > 0.01 * total);
  const list = h("ol", { class: "chain" });
  const more = h("div", { class: "more" });
  let at = 0;
  const grow = (by) => {
    for (const [place, link] of shown.slice(at, at + by).entries()) {
      const before = shown[at + place - 1];
      const rank = DATA.ranks.length > 1 && (!before || before.rank !== link.rank) ? `  (rank ${link.rank})` : "";
      const notes = [link.compiling > SKEW ? `${seconds(link.compiling)} compiling` : "",
        link.waited_for === null ? "" : `${seconds(link.wait)} waiting for rank ${link.waited_for}`].filter(Boolean);
      list.append(h("li", { class: link.step === UNNAMED ? "unnamed" : null },
        link.step === UNNAMED ? h("span", { class: "faint" }, link.step) : stepButton(link.step, false),
        ` @${seconds(link.start)} +${seconds(link.took)}`, h("strong", {}, rank),
        notes.length ? h("div", { class: "faint" }, notes.join(", ")) : null,
        link.queue > Math.max(SKEW, total / 1000) ? h("div", { class: "queued" }, `⋯ ${seconds(link.queue)} ` +
          (link.behind.length ? `behind ${link.behind.slice(0, 5).join(", ")}` +
            (link.behind.length > 5 ? ` and ${link.behind.length - 5} more` : "") : "nothing recorded was in the way"))
          : null));
    }
    at = Math.min(shown.length, at + by);
    more.replaceChildren();
    if (at < shown.length) more.append(h("button", { onclick: () => grow(500) }, `${shown.length - at} more`));
  };
  grow(40);
  made.append(list, more);
}

// ---- graph --------------------------------------------------------------------------------------------------------
function graph() {
  const made = section("graph", "The graph of steps");
  if (DATA.graph === null) {
    return made.append(h("p", {}, "This run has no graph: it was recorded, not run as one. So what needs what is not known, " +
      "nor slack, nor what another schedule would give. A run of initopt.Startup, or of the TorchRec plugin, has one."));
  }
  const { steps, edges, drawn } = DATA.graph;
  const place = h("div", { class: "graph" });
  made.append(h("p", { class: "faint" }, (drawn ? "" : `${count(steps.length, "step")} are too many to draw: here are the ` +
    "neighbours of the chosen one. ") + "From top to bottom; a step comes after those it has a line to. Solid: needs its " +
    "value; dashed: a stated order; dotted: both touch one resource. What other lines imply is not drawn: choose a step " +
    "for all that it needs. Thick outline and bold: on the longest chain of the rank above."), place);
  redraw.push(() => {
    if (drawn) return drawGraph(place, steps.map((step) => step.name), edges.filter((edge) => edge[4]));
    const name = steps.some((step) => step.name === state.step) ? state.step : steps[steps.length - 1].name;
    const near = edges.filter((edge) => edge[0] === name || edge[1] === name).slice(0, 60);
    drawGraph(place, [...new Set([name, ...near.flatMap((edge) => edge.slice(0, 2))])], near);
  });
}
function drawGraph(place, names, edges) {
  const took = new Map(recorded().bars.map((bar) => [bar.name, bar.end - bar.start]));
  const marked = longest();
  const level = new Map(), before = new Map(names.map((name) => [name, []]));
  for (const [from, to] of edges) before.get(to).push(from);
  const depth = (name) => {
    if (!level.has(name)) level.set(name, Math.max(-1, ...before.get(name).map(depth)) + 1);
    return level.get(name);
  };
  names.forEach(depth);
  const said = new Map(names.map((name) => [name, took.has(name) ? seconds(took.get(name)) : "did not run"]));
  const text = new Map(names.map((name) => [name, clipped(name, 170)]));
  const rows = Array.from({ length: Math.max(...level.values()) + 1 }, () => []);
  for (const name of names) {
    rows[level.get(name)].push({ name, room: Math.max(wide(text.get(name), true), wide(said.get(name), true)) + 32, over: [] });
  }
  const spot = new Map(rows.flat().map((one) => [one.name, one]));
  // A line that passes a row keeps a place in it, so that it runs beside the steps there and not behind them.
  const lines = edges.map(([from, to, kind, resource]) => {
    const through = [spot.get(from)];
    for (let row = level.get(from) + 1; row < level.get(to); row += 1) {
      const bend = { room: 12, over: [through[through.length - 1]] };
      rows[row].push(bend);
      through.push(bend);
    }
    spot.get(to).over.push(through[through.length - 1]);
    return { from, to, kind, resource, through: [...through, spot.get(to)] };
  });
  const broad = (row) => row.reduce((sum, one) => sum + one.room, 0);
  const width = Math.max(240, ...rows.map(broad));
  for (const row of rows) {
    for (const one of row) one.wish = one.over.length ? one.over.reduce((sum, other) => sum + other.x, 0) / one.over.length : width / 2;
    row.sort((a, b) => a.wish - b.wish);
    let x = (width - broad(row)) / 2;
    for (const one of row) {
      one.x = x + one.room / 2;
      x += one.room;
    }
  }
  const high = 66, tall = 36;
  const height = (rows.length - 1) * high + tall + 8;
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Graph of steps" },
    s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, orient: "auto",
      markerUnits: "userSpaceOnUse" },
      s("path", { d: "M0 0 L8 4 L0 8 z", class: "head" }))));
  for (const line of lines) {
    let row = level.get(line.from), at = line.through[0].x;
    let d = `M${at} ${row * high + tall + 4}`;
    for (const next of line.through.slice(1)) {
      const [y1, y2] = [row * high + tall + 4, (row + 1) * high + 4];
      d += ` C${at} ${y1 + 22} ${next.x} ${y2 - 22} ${next.x} ${y2}`;
      if (!next.name) d += ` V${y2 + tall}`;
      at = next.x;
      row += 1;
    }
    const touched = state.step !== null && (line.from === state.step || line.to === state.step);
    svg.append(s("path", { d, "marker-end": "url(#arrow)", class: `edge ${line.kind}${touched ? " touched" : ""}` },
      s("title", {}, `${line.from} → ${line.to} (${line.resource || line.kind})`)));
  }
  for (const name of names) {
    const { x, room } = spot.get(name), y = level.get(name) * high + 4;
    const here = state.step === name;
    const label = `${name}, ${said.get(name)}${marked.has(name) ? ", longest chain" : ""}`;
    svg.append(s("g", { class: `node${marked.has(name) ? " longest" : ""}${here ? " picked" : ""}`, role: "button", tabindex: 0,
      "aria-label": label, "aria-pressed": String(here), "data-step": name, onclick: () => pick(name), onkeydown: (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        pick(name);
        const again = [...place.querySelectorAll(".node")].find((node) => node.dataset.step === name);
        if (again) again.focus();
      } }, s("title", {}, label), s("rect", { x: x - room / 2 + 7, y, width: room - 14, height: tall, rx: 5 }),
    s("text", { x, y: y + 15, "text-anchor": "middle" }, text.get(name)),
    s("text", { x, y: y + 30, "text-anchor": "middle", class: "quiet" }, said.get(name))));
  }
  place.replaceChildren(svg);
}

// ---- blame --------------------------------------------------------------------------------------------------------
function blame() {
  const said = h("p", { class: "faint" });
  const filter = h("input", { type: "search", placeholder: "part of a name", "aria-label": "Only steps whose name has",
    oninput: () => fillBlame() });
  const place = h("div");
  section("blame", "Blame: the longest steps", said, h("div", { class: "tools" }, filter), place);
  let drawn = null;
  const fillBlame = () => {
    const { steps } = lanesOf();
    const part = filter.value.toLowerCase();
    const rows = steps.filter((row) => row.step.toLowerCase().includes(part));
    const marked = longest();
    const most = Math.max(1e-9, ...rows.slice(0, 1).map((row) => row.took || 0));
    said.textContent = `Rank ${state.rank}, ${count(steps.length, "step")}. ● on the longest chain. slack: a step may grow by ` +
      "this much before the graph's longest chain grows. Bars: solid work, dotted compiling, hatched wait for other ranks.";
    const columns = [["took", "number"], ["work", "number"], ["wait", "number"], ["slack", "number"], ["step"], ["lane"],
      ["share", "share"], ["note"]];
    place.replaceChildren(...table(columns, rows.map((row) => () => h("tr", {}, cells(seconds(row.took || 0),
      seconds(row.work || 0), dot(row.wait), row.slack === undefined ? "·" : seconds(row.slack)),
    nameCell(row.step, stepButton(row.step, marked.has(row.step))), h("td", { class: "tight faint" }, row.lane),
    h("td", { class: "share" }, tiny(row, most, marked.has(row.step))), h("td", { class: "wide" }, row.note || ""))), "Steps, the longest first"));
    if (!rows.length) place.replaceChildren(h("p", {}, part ? "No step has that in its name." : "No step was recorded."));
  };
  redraw.push(() => {
    if (drawn === state.rank) return;
    drawn = state.rank;
    fillBlame();
  });
}
function tiny(row, most, marked) {
  const scale = 150 / most, took = row.took || 0;
  const [wait, compiling] = [(row.wait || 0) * scale, Math.min((row.compiling || 0) * scale, took * scale)];
  const body = Math.max(took > 0 ? 3 : 0, took * scale - wait);
  return s("svg", { class: "tiny", "aria-hidden": "true" }, s("g", { class: marked ? "longest" : null },
    s("rect", { class: "fill", x: 1, y: 1, width: Math.max(0, body - 2), height: 10 })),
  s("rect", { x: 1 + body - compiling, y: 1, width: Math.max(0, compiling - 2), height: 10, fill: "url(#dots-all)" }),
  s("rect", { x: body, y: 1, width: Math.max(0, wait - 1), height: 10, class: "waiting", fill: "url(#hatch-all)" }));
}

// ---- collectives --------------------------------------------------------------------------------------------------
function collectives() {
  const made = section("collectives", "Collectives: which meetings are needed");
  const found = DATA.collectives;
  made.append(...(found.problems || []).map((problem) => h("div", {}, warned([problem.text]), h("ul", {},
    problem.parties.map((party) => h("li", {}, `${party.ranks.length === 1 ? "rank" : "ranks"} ${short(party.ranks)}: ${party.what}` +
      `${party.number ? ` (call ${party.number})` : ""}${party.call_site ? ` at ${party.call_site}` : ""}`))))));
  if (!found.findings || !found.findings.length) {
    return made.append(h("p", {}, found.unknown || "No collective was recorded before the first batch."));
  }
  const out = found.findings.filter((one) => one.verdict !== "keep").length;
  if (DATA.verify.meetings !== undefined && !DATA.verify.problems.length) {
    made.append(h("p", {}, `${count(DATA.verify.meetings, "meeting")}, in one order on all ranks that left a record.`));
  }
  made.append(h("p", {}, out ? `~${seconds(found.saving)} saved together. 'saves' is simulated, not read off 'took': a removed ` +
    "wait turns up at the next meeting. Nothing is applied by this page." : "All of them stay."));
  const columns = [["saves", "number"], ["took", "number"], ["wait", "number"], ["n", "number"], ["collective"], ["group"],
    ["verdict"], ["why"]];
  made.append(...table(columns, found.findings.map((one) => () => h("tr", {},
    cells(one.saving >= 0.0005 ? `~${seconds(one.saving)}` : "·", seconds(one.took), dot(one.wait), one.count),
    nameCell(one.name, one.name), h("td", { class: "tight" }, clipped(one.group, 160)), h("td", {}, h(one.verdict === "keep" ? "span" : "strong", {}, one.verdict)),
    h("td", { class: "wide" }, h("details", {}, h("summary", {}, one.reason || "the proof"), proof(one))))), "Collectives"));
}
const short = (ranks) => ranks.slice(0, 12).join(", ") + (ranks.length > 12 ? `, ... (${ranks.length} in all)` : "");
function proof(one) {
  const by = one.verdict === "keep" ? "" : one.rewrite ? `Applied by the rewrite ${one.rewrite}.` : `Not applied: ${one.unapplied}.`;
  const check = one.agreed ? " One meeting stays as the check (the Agreement)." : "";
  return [h("ol", { class: "proof" }, one.proof.map((sentence) => h("li", {}, sentence))), by ? h("p", {}, by + check) : null,
    one.meetings.map((met) => h("div", {}, `${met.op} on ${met.group}${met.sequence >= 0 ? `, call ${met.sequence}` : ""}, ranks ` +
      `${met.ranks}, ${met.bytes.toLocaleString("en")} bytes a rank`,
    (met.callers.length ? met.callers : [met.call_site]).map((site) => h("div", { class: "site mono" }, site)))),
    one.more_meetings ? h("p", { class: "faint" }, `and ${one.more_meetings} more: initopt collectives --json`) : null];
}

// ---- ranks --------------------------------------------------------------------------------------------------------
function ranks() {
  const made = section("ranks", "Ranks");
  const done = DATA.sentence !== null;
  made.append(h("p", { class: "faint" }, `${done ? "Those that stopped, then the slowest first. " : ""}Differs: steps whose work ` +
    "is more or less than on the median rank, by how much; and what the rank ran with where most had another."));
  const most = Math.max(1e-9, ...DATA.ranks.map((row) => row.first_batch || 0));
  const columns = done ? [["rank"], ["host"], [DATA.goal, "number"], ["work", "number"], ["wait", "number"], ["queue", "number"],
    ["share", "share"], ["differs"]] : [["rank"], ["host"], ["where it stopped"], ["differs"]];
  const rows = DATA.ranks.map((row) => () => {
    const which = String(row.rank) in DATA.lanes ? h("button", { class: "step", "data-rank": row.rank, onclick: () => {
      choose(row.rank);
      document.getElementById("lanes").scrollIntoView();
    } }, `${row.rank}`) : `${row.rank}`;
    const stopped = row.first_batch === null ? h("strong", {}, stopping(row)) : null;
    const apart = [row.differs.map(([name, by]) => `${by > 0 ? "+" : "−"}${seconds(Math.abs(by))} ${name}`).join("; "),
      row.odd.map((text) => h("div", { class: "warn" }, `! ${text}`))];
    const known = [h("td", { class: "tight" }, which, row.rank === DATA.median_rank ? h("span", { class: "faint" }, " median") : null),
      h("td", { class: "tight" }, row.host)];
    if (!done) return h("tr", {}, known, h("td", { class: "name" }, stopped), h("td", { class: "wide" }, apart));
    return h("tr", {}, known, row.first_batch === null ? cells("·", "·", "·", "·")
      : cells(seconds(row.first_batch), seconds(row.work), dot(row.wait), dot(row.queue)),
    h("td", { class: "share" }, row.first_batch === null ? "" : split(row, most)), h("td", { class: "wide" }, stopped,
      stopped && row.differs.length ? "; " : "", apart));
  });
  made.append(...table(columns, rows, "Ranks"));
  if (DATA.missing) made.append(h("p", { class: "warn" }, `! no record of rank${DATA.missing_ranks.length > 1 ? "s" : ""} ${DATA.missing}`));
}
function stopping(row) {
  const last = row.stopped;
  const how = !last ? "no step was recorded" : last.error ? `failed in ${last.step} with ${last.error} after ${seconds(last.end)}`
    : `last recorded step ${last.step}, ended after ${seconds(last.end)}`;
  return [how, ...row.stuck].join("; ");
}
function split(row, most) {
  const scale = 150 / most;
  const [work, wait, queue] = [row.work * scale, row.wait * scale, row.queue * scale];
  return s("svg", { class: "tiny", "aria-hidden": "true" }, s("rect", { class: "fill", y: 1, width: work, height: 10 }),
    s("rect", { x: work, y: 1, width: wait, height: 10, class: wait > 1 ? "waiting" : null, fill: "url(#hatch-all)" }),
    queue > 1 ? s("path", { d: `M${work + wait} 6 H${work + wait + queue}`, class: "queue" }) : null);
}

// ---- compiled, imported, advice ------------------------------------------------------------------------------------
function compiled() {
  const made = section("compile", "What was compiled");
  const found = DATA.compile;
  if (found.unknown || !found.graphs.length) {
    made.append(h("p", {}, found.unknown || `torch's compiler did nothing on rank ${found.rank}, as far as this was recorded.`));
  } else {
    const sum = found.compile;
    made.append(h("p", {}, `Rank ${found.rank}: ${seconds(sum.took)}; ${count(sum.graphs, "graph")}, ${sum.from_cache} from cache, ` +
      `${sum.recompiled} recompiled, ${count(sum.breaks, "graph break")}, ${sum.failed} failed.`));
    const columns = [["took", "number"], ["dynamo", "number"], ["aot", "number"], ["backend", "number"], ["cache"], ["pass"], ["step"],
      ["graph"]];
    made.append(...table(columns, found.graphs.map((one) => () => {
      const said = [one.failure ? `failed: ${one.failure}` : "", one.recompile_reason ? `compiled anew: ${one.recompile_reason}` : "",
        ...one.breaks.map((text) => `graph break: ${text}`), ...one.restarts.map((text) => `traced again: ${text}`)].filter(Boolean);
      return h("tr", {}, cells(seconds(one.took), dot(one.dynamo), dot(one.aot_autograd), dot(one.backend)),
        h("td", {}, one.cache || "·"), h("td", { class: "tight" }, one.direction), nameCell(one.step, one.step ? stepButton(one.step, false) : "·"),
        h("td", { class: "wide" }, one.failure || one.recompile_reason ? h("strong", {}, one.name) : one.name, " ",
          h("span", { class: "site" }, one.place), said.map((text) => h("div", { class: "faint" }, text))));
    }), "Turns of the compiler"));
  }
  for (const cache of (found.caches || []).slice(0, ROWS)) {
    const role = { leader: "led", follower: `followed rank ${cache.leader}`, alone: "went alone" }[cache.role];
    made.append(h("p", { class: "faint" }, `Rank ${cache.rank} ${role}; the code was ${cache.hit ? "" : "not "}there` +
      `${cache.why ? ` (${cache.why})` : ""}${cache.waited > SKEW ? `; waited ${seconds(cache.waited)}` : ""}.`));
  }
  if ((found.caches || []).length > ROWS) made.append(h("p", { class: "faint" }, `and ${found.caches.length - ROWS} more ranks.`));
}
function imports() {
  const made = section("imports", "What was imported");
  const found = DATA.imports;
  if (found.unknown) return made.append(h("p", {}, `Not known: ${found.unknown}.`));
  const modules = found.packages.reduce((sum, one) => sum + one.modules, 0);
  made.append(h("p", {}, `Rank ${found.rank}: ${count(modules, "module")} of ${count(found.packages.length, "package")} in ` +
    `${seconds(found.seconds)}, ${seconds(found.cpu)} of it CPU time.`));
  if (found.imported_before.length) made.append(h("p", { class: "faint" }, `Not seen, imported before: ${found.imported_before.slice(0, 12).join(", ")}` +
    `${found.imported_before.length > 12 ? ", ..." : ""}.`));
  const needed = { yes: "yes", no: "no~", "": "·" };
  made.append(...table([["self", "number"], ["total", "number"], ["modules", "number"], ["needed"], ["package"], ["asked for by"]],
    found.packages.map((one) => () => h("tr", {}, cells(seconds(one.seconds), seconds(one.total), one.modules), h("td", {}, needed[one.needed]),
      nameCell(one.package, one.package), h("td", { class: "wide site" }, one.asked))), "Packages, the longest first"));
  made.append(h("h3", {}, "By line"), ...table([["took", "number"], ["line"], ["brought in"]], found.lines.map((one) => () => h("tr", {},
    cells(seconds(one.seconds)), nameCell(one.line, [one.line, one.own ? "" : h("div", { class: "faint" }, "a library's line")]),
    h("td", { class: "wide" }, one.packages.slice(0, 6).map(([name, value]) => `${name} ${seconds(value)}`).join(", "),
      one.unneeded.length ? h("div", { class: "faint" }, `not needed~: ${one.unneeded.map(([name]) => name).join(", ")}`) : null))), "Lines that import"));
}
function advice() {
  const made = section("advice", "Advice: what the first batch did not need");
  const found = DATA.defer;
  if (found.unknown) return made.append(h("p", {}, `Not known: ${found.unknown}.`));
  if (found.findings.length) {
    made.append(h("p", {}, `Together ~${seconds(Math.max(0, found.saves))}, simulated with all of them after the first batch.`));
    made.append(...table([["took", "number"], ["saves", "number"], ["what"], ["where"], ["holds if"]], found.findings.map((one) => () =>
      h("tr", {}, cells(dot(one.took), about(one.saves)), nameCell(one.what, one.kind === "step" ? stepButton(one.what, false) : one.what),
        h("td", { class: "site" }, one.place, one.step && one.kind !== "step" ? `, in step ${one.step}` : ""),
        h("td", { class: "wide" }, h("ul", {}, one.provided.map((text) => h("li", {}, text)),
          one.kept.length ? h("li", {}, `keeps ${one.kept.slice(0, 5).join(", ")}, which it also brought in`) : null)))), "What could come later"));
  } else made.append(h("p", {}, "Nothing was found that the first batch did not need."));
  const names = { steps: "steps and their values", loaders: "data loaders", groups: "process groups", imports: "imports" };
  made.append(h("p", { class: "faint" }, `Looked at: ${found.looked_at.map((what) => names[what]).join(", ") || "nothing"}.`));
  for (const [what, why] of Object.entries(found.not_looked_at)) made.append(h("p", { class: "faint" }, `Not at ${names[what]}: ${why}.`));
}
function leftOut() {
  section("left-out", "What this page leaves out", h("ul", {}, DATA.left_out.map((text) => h("li", {}, text))),
    h("p", { class: "faint" }, `Made from ${DATA.path} by initopt report --html. A number with ~ is an estimate.`));
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
advice();
leftOut();
for (const part of main.querySelectorAll("section")) nav.append(h("a", { href: `#${part.id}` }, part.querySelector("h2").textContent.split(":")[0]));
document.body.append(asked);
redraw.push(details);
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && state.step !== null) pick(null); });
// A closed proof would not be on paper.
addEventListener("beforeprint", () => { for (const one of document.querySelectorAll("details")) one.open = true; });
whole();
document.documentElement.dataset.drawn = "yes";
})();
