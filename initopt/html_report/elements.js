// What a run says becomes text in elements: never markup, never code.
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

const say = (...children) => h("p", {}, ...children);
const note = (...children) => h("p", { class: "faint" }, ...children);
const td = (kind, ...children) => h("td", { class: kind }, ...children);
const rankOr = (ranks) => (ranks.length === 1 ? "rank" : "ranks");
function section(id, title, ...children) {
  const made = h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title),
    ...children);
  main.append(made);
  return made;
}

function table(columns, rows, caption) {
  // A column whose name ends in > has numbers.
  const kind = (name) => (name.endsWith(">") ? "number" : name === "share" ? "share" : null);
  const heads = columns.map((name) => h("th", { scope: "col", class: kind(name) }, name.replace(/>$/, "")));
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
    if (left) more.append(h("button", { onclick: () => grow(500) }, `${left} more`));
  };
  grow(ROWS);
  return [h("div", { class: "scroll" }, made), more];
}

const place = (text, ...more) => [h("span", { class: "place" }, text), ...more];
const cells = (...values) => values.map((value) => td("number", value));
const nameCell = (name, shown) => h("td", { class: name.length > 40 ? "name" : "label" }, shown);
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
