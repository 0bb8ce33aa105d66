// Lanes over time: what is drawn of them, zoom, pointer and keys.
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
    note("Drag over a part to see more of it, double-click for all; Ctrl and the wheel zoom as well. " +
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
    const svg = s("svg", { width: 30, height: 16, "aria-hidden": "true" }, patterns(`key-${text.length}`),
      draw(text.length));
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
  addEventListener("pointercancel", () => {
    if (box) box.remove();
    from = box = null;
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
    chart.append(say("No step was recorded on this rank."));
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
    const title = panel.name === "recorded" ? `recorded, rank ${state.rank}`
      : "planned (~): this graph, nobody waiting";
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
  said.textContent = thin ? `${part}; ${thin.toLocaleString("en")} more thinner than a pixel: zoom in` : part;
}

function onLane(panel, lane) {
  return panel.bars.map((bar, place) => [bar, place]).filter(([bar]) => bar.lane === lane)
    .sort((a, b) => a[0].start - b[0].start || b[0].end - a[0].end);
}

function drawLane(group, panel, number, lane, top, x) {
  const at = top + UP;
  const drawn = [];
  let edge = -Infinity, edgeLongest = false, thin = 0, outer = -Infinity;
  for (const [bar, place] of onLane(panel, lane)) {
    if (bar.end < state.from || bar.start > state.to) continue;
    const left = Math.max(x(bar.start), -50), right = Math.min(x(bar.end), x(state.to) + 50);
    const picked = state.step === bar.name;
    if (right - left < 1 && right - edge < 1 && !picked && (edgeLongest || !bar.longest)) {
      thin += 1;
      continue;
    }
    edge = Math.max(edge, right);
    edgeLongest = Boolean(bar.longest);
    // What ran inside of another bar is half as high, so that both are seen.
    const nested = bar.start < outer - 1e-6;
    outer = Math.max(outer, bar.end);
    // A thin bar has no room for an outline: the longest chain stands out by its height.
    const stick = bar.longest && right - left < 4 ? 3 : 0;
    const y = nested ? at + BAR / 2 : at - stick, tall = nested ? BAR / 2 : BAR + 2 * stick;
    const wideBar = Math.max(1, right - left);
    const looks = [bar.longest ? " longest" : "", stick ? " thin" : "", picked ? " picked" : ""].join("");
    const one = s("g", { class: `bar${looks}`, "data-step": bar.name, onclick: () => {
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
    }
    drawn.push({ bar, one, nested, seen: [Math.max(left, plot.left), Math.min(right, plot.left + plot.inner)] });
    group.append(one);
  }
  nameBars(drawn, at, x);
  for (const queue of panel.queues.filter((one) => one.lane === lane)) {
    group.append(s("path", { d: `M${x(queue.start)} ${at + BAR + 4} H${x(queue.end)}`, class: "queue" },
      s("title", {}, `${queue.step}: queued ${seconds(queue.end - queue.start)}` +
        (queue.behind && queue.behind.length ? ` behind ${queue.behind.join(", ")}` : ""))));
  }
  return { thin, bars: drawn.length };
}

const shared = (a, b) => Math.min(a[1], b[1]) - Math.max(a[0], b[0]);

// A name stands in its bar, or above it. What is not named has its name in the tooltip, the details and the table.
function nameBars(drawn, at, x) {
  const inner = drawn.filter((each) => each.nested).map((each) => each.seen);
  const named = new Set(), above = [];
  for (const each of drawn) {
    const { bar, one, nested, seen } = each;
    for (const [start, stop, text] of bar.imports || []) {
      const part = [Math.max(seen[0], x(start)), Math.min(seen[1], x(stop))];
      if (part[1] - part[0] > wide(text) + 6 && !inner.some((other) => shared(part, other) > 0)) {
        one.append(s("text", { x: (part[0] + part[1]) / 2, y: at + 13, "text-anchor": "middle", class: "within" }, text));
      }
    }
    const room = solid(bar, x, seen, inner), long = wide(bar.name, bar.longest);
    if (room[1] - room[0] > long + 8 && !bar.imports && !nested) {
      const middle = (room[0] + room[1]) / 2;
      // Among dots a name can't be read.
      const behind = { class: "behind", x: middle - long / 2 - 3, y: at + 2, width: long + 6, height: BAR - 4 };
      if (bar.compiles) one.append(s("rect", behind));
      one.append(s("text", { x: middle, y: at + 13, "text-anchor": "middle",
        class: bar.longest ? "within strong" : "within" }, bar.name));
      named.add(each);
    }
  }
  // The widest first, and none over more of a neighbour without a name than of its own bar: it would be read as that
  // neighbour's.
  const width = (each) => each.seen[1] - each.seen[0];
  for (const each of drawn.filter((one) => !named.has(one)).sort((a, b) => width(b) - width(a))) {
    const { bar, one, seen } = each;
    const long = wide(bar.name, bar.longest), start = Math.min(seen[0], plot.left + plot.inner - long);
    const text = [start, start + long], own = Math.max(4, shared(text, seen));
    if (seen[1] < plot.left || start < plot.left || above.some((other) => shared(text, other) > -6)) continue;
    if (drawn.some((other) => other !== each && !named.has(other) && shared(text, other.seen) > own)) continue;
    one.append(s("text", { x: start, y: at - 4, class: bar.longest ? "strong" : null }, bar.name));
    above.push(text);
    named.add(each);
  }
}

function solid(bar, x, seen, inner) {
  const times = [bar.start, ...(bar.waits || []).flat(), bar.end].map(x);
  // What ran inside of a bar is drawn over it.
  const parts = inner.filter((part) => shared(part, seen) > 0 && part !== seen);
  const edges = parts.length ? free(times, parts) : times;
  let best = [0, 0];
  for (let at = 0; at + 1 < edges.length; at += 2) {
    const part = [Math.max(edges[at], seen[0]), Math.min(edges[at + 1], seen[1])];
    if (part[1] - part[0] > best[1] - best[0]) best = part;
  }
  return best;
}

// The edges of what is left of the pieces between `edges` (from, to, from, to, ...) without these parts.
function free(edges, parts) {
  const found = [];
  for (let at = 0; at + 1 < edges.length; at += 2) {
    let from = edges[at];
    for (const [start, stop] of parts) {
      if (stop <= from || start >= edges[at + 1]) continue;
      if (start > from) found.push(from, start);
      from = stop;
    }
    if (from < edges[at + 1]) found.push(from, edges[at + 1]);
  }
  return found;
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
  if (!here) {
    const first = panels.findIndex((panel) => panel.bars.length);
    if (first < 0) return;
    const [bar, place] = onLane(panels[first], panels[first].lanes[0])[0];
    return pick(bar.name, first, place, true);
  }
  if (way === 1 || way === -1) {
    const row = onLane(panels[state.panel], here.lane);
    const next = row[row.findIndex(([, place]) => place === state.bar) + way];
    return next && pick(next[0].name, state.panel, next[1], true);
  }
  const all = panels.flatMap((panel, number) => panel.lanes.map((lane) => [number, lane]));
  const now = all.findIndex(([number, lane]) => number === state.panel && lane === here.lane);
  const other = all[now + (way === "down" ? 1 : -1)];
  if (!other) return;
  const near = onLane(panels[other[0]], other[1]).reduce((best, one) =>
    Math.abs(one[0].start - here.start) < Math.abs(best[0].start - here.start) ? one : best);
  pick(near[0].name, other[0], near[1], true);
}
