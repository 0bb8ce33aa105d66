// The graph of steps, from top to bottom: a row for each place in the order, lines beside the steps that they pass.
function graph() {
  const made = section("graph", "The graph of steps");
  if (DATA.graph === null) {
    return made.append(say("This run has no graph: it was recorded, not run as one. So what needs what is not known, " +
      "nor slack, nor what another schedule would give. A run of initopt.Startup or of the TorchRec plugin has one."));
  }
  const { steps, edges, drawn } = DATA.graph;
  const place = h("div", { class: "graph" });
  made.append(note((drawn ? "" : `${count(steps.length, "step")} are too many to draw: here are the ` +
    "neighbours of the chosen one. ") + "From top to bottom; a step comes after those it has a line to. Solid: needs " +
    "its value; dashed: a stated order; dotted: both touch one resource. What other lines imply is not drawn: choose " +
    "a step for all that it needs. Thick outline and bold: on the longest chain of the rank above."), place);
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
    rows[level.get(name)].push({ name, room: Math.max(wide(text.get(name), true), wide(said.get(name), true)) + 32,
      over: [] });
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
    for (const one of row) one.wish = one.over.length ? one.over.reduce((sum, other) => sum + other.x,
      0) / one.over.length : width / 2;
    row.sort((a, b) => a.wish - b.wish);
    let x = (width - broad(row)) / 2;
    for (const one of row) {
      one.x = x + one.room / 2;
      x += one.room;
    }
  }
  const high = 66, tall = 36;
  const height = (rows.length - 1) * high + tall + 8;
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group",
    "aria-label": "Graph of steps" },
    s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9,
      orient: "auto",
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
    svg.append(s("g", { class: `node${marked.has(name) ? " longest" : ""}${here ? " picked" : ""}`, role: "button",
      tabindex: 0,
      "aria-label": label, "aria-pressed": String(here), "data-step": name, onclick: () => pick(name),
        onkeydown: (event) => {
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
