// The parts of the page that are lists and tables.
function chain() {
  const made = section("chain", "The chain that decided",
    note("Across ranks, the last step first: @ when it began, + how long it took, ⋯ ready but queued. " +
      "At a meeting the chain goes on at the rank that came last."));
  if (DATA.chain.unknown) return made.append(say(DATA.chain.unknown));
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
    said.textContent = `Rank ${state.rank}, ${count(steps.length, "step")}. ● on the longest chain. slack: a step may ` +
      "grow by this much before the graph's longest chain grows. Bars: solid work, dotted compiling, hatched wait for " +
      "other ranks.";
    const columns = ["took>", "work>", "wait>", "slack>", "step", "lane", "share", "note"];
    place.replaceChildren(...table(columns, rows.map((row) => () => h("tr", {}, cells(seconds(row.took || 0),
      seconds(row.work || 0), dot(row.wait), row.slack === undefined ? "·" : seconds(row.slack)),
    nameCell(row.step, stepButton(row.step, marked.has(row.step))), td("tight faint", row.lane),
    td("share", tiny(row, most, marked.has(row.step))), td("wide", row.note || ""))), "Steps, the longest first"));
    if (!rows.length) place.replaceChildren(say(part ? "No step has that in its name." : "No step was recorded."));
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

function collectives() {
  const made = section("collectives", "Collectives: which meetings are needed");
  const found = DATA.collectives;
  made.append(...(found.problems || []).map((problem) => h("div", {}, warned([problem.text]), h("ul", {},
    problem.parties.map((party) => h("li", {}, `${rankOr(party.ranks)} ${short(party.ranks)}: ${party.what}` +
      `${party.number ? ` (call ${party.number})` : ""}${party.call_site ? ` at ${party.call_site}` : ""}`))))));
  for (const one of found.left_out || []) {
    made.append(say(`Left out: ${count(one.count, "meeting")} by ${one.name} (${one.reason})`,
      one.place ? [", ", place(one.place)] : null, "."));
  }
  if (!found.findings || !found.findings.length) {
    return made.append(say(found.unknown || "No meeting was recorded before the first training step."));
  }
  const out = found.findings.filter((one) => one.verdict !== "keep").length;
  if (DATA.verify.meetings !== undefined && !DATA.verify.problems.length) {
    const before = DATA.verify.before_training;
    const among = before < DATA.verify.meetings ? `, ${before} of them before the first training step` : "";
    made.append(say(`${count(DATA.verify.meetings, "meeting")}${among}, in one order on all ranks that left a record.`));
  }
  made.append(say(out ? `~${seconds(found.saving)} saved by all of them together, 'saves' by one alone, both ` +
    "simulated: a wait that goes away turns up at the next meeting, and is saved only where that one goes, too. " +
    "Nothing is applied by this page." : "All of them stay."));
  const columns = ["saves>", "took>", "wait>", "n>", "collective", "group", "verdict", "why"];
  made.append(...table(columns, found.findings.map((one) => () => h("tr", {},
    cells(one.saving >= 0.0005 ? `~${seconds(one.saving)}` : "·", seconds(one.took), dot(one.wait), one.count),
    nameCell(one.name, one.name), td("tight", clipped(one.group, 160)), td(null,
      h(one.verdict === "keep" ? "span" : "strong", {}, one.verdict)),
    td("wide", h("details", {}, h("summary", {}, one.reason || "the proof"), proof(one))))), "Collectives"));
}

const short = (ranks) => ranks.slice(0, 12).join(", ") + (ranks.length > 12 ? `, ... (${ranks.length} in all)` : "");
function proof(one) {
  const applied = one.rewrite ? `Applied by the rewrite ${one.rewrite}.` : `Not applied: ${one.unapplied}.`;
  const by = one.verdict === "keep" ? "" : applied;
  const check = one.agreed ? " One meeting is kept, in which ranks see that they hold the same." : "";
  return [h("ol", { class: "proof" }, one.proof.map((sentence) => h("li", {}, sentence))), by ? say(by + check) : null,
    one.meetings.map((met) => h("div", {},
      `${met.op} on ${met.group}${met.sequence >= 0 ? `, call ${met.sequence}` : ""}, ranks ` +
      `${met.ranks}, ${met.bytes.toLocaleString("en")} bytes a rank`,
    (met.callers.length ? met.callers : [met.call_site]).map((site) => h("div", { class: "site mono" }, site)))),
    one.more_meetings ? note(`and ${one.more_meetings} more: initopt collectives --json`) : null];
}

function ranks() {
  const made = section("ranks", "Ranks");
  const done = DATA.sentence !== null;
  made.append(note(`${done ? "Those that stopped, then the slowest first. " : ""}Differs: steps whose work ` +
    "is more or less than on the median rank, by how much; and what the rank ran with where most had another."));
  const most = Math.max(1e-9, ...DATA.ranks.map((row) => row.first_batch || 0));
  const columns = done ? ["rank", "host", `${DATA.goal}>`, "work>", "wait>", "queue>",
    "share", "differs"] : ["rank", "host", "where it stopped", "differs"];
  const rows = DATA.ranks.map((row) => () => {
    const which = String(row.rank) in DATA.lanes ? h("button", { class: "step", "data-rank": row.rank, onclick: () => {
      choose(row.rank);
      document.getElementById("lanes").scrollIntoView();
    } }, `${row.rank}`) : `${row.rank}`;
    const stopped = row.first_batch === null ? h("strong", {}, stopping(row)) : null;
    const apart = [row.differs.map(([name, by]) => `${by > 0 ? "+" : "−"}${seconds(Math.abs(by))} ${name}`)
      .join("; "),
      row.odd.map((text) => h("div", { class: "warn" }, `! ${text}`))];
    const known = [td("tight", which, row.rank === DATA.median_rank ? h("span", { class: "faint" }, " median") : null),
      td("tight", row.host)];
    if (!done) return h("tr", {}, known, td("name", stopped), td("wide", apart));
    return h("tr", {}, known, row.first_batch === null ? cells("·", "·", "·", "·")
      : cells(seconds(row.first_batch), seconds(row.work), dot(row.wait), dot(row.queue)),
    td("share", row.first_batch === null ? "" : split(row, most)), td("wide", stopped,
      stopped && row.differs.length ? "; " : "", apart));
  });
  made.append(...table(columns, rows, "Ranks"));
  if (DATA.missing) made.append(h("p", { class: "warn" },
    `! no record of ${rankOr(DATA.missing_ranks)} ${DATA.missing}`));
}

function stopping(row) {
  const last = row.stopped;
  return [last ? last.said : "no step was recorded", ...row.stuck].join("; ");
}

function split(row, most) {
  const scale = 150 / most;
  const [work, wait, queue] = [row.work * scale, row.wait * scale, row.queue * scale];
  return s("svg", { class: "tiny", "aria-hidden": "true" }, s("rect", { class: "fill", y: 1, width: work, height: 10 }),
    s("rect", { x: work, y: 1, width: wait, height: 10, class: wait > 1 ? "waiting" : null, fill: "url(#hatch-all)" }),
    queue > 1 ? s("path", { d: `M${work + wait} 6 H${work + wait + queue}`, class: "queue" }) : null);
}

function compiled() {
  const made = section("compile", "What was compiled");
  const found = DATA.compile;
  if (found.unknown || !found.graphs.length) {
    const nothing = `torch's compiler did nothing on rank ${found.rank}, as far as this was recorded.`;
    made.append(say(found.unknown || nothing));
  } else {
    const sum = found.compile;
    made.append(say(`Rank ${found.rank}: ${seconds(sum.took)}; ${count(sum.graphs, "graph")}, ${sum.from_cache} from ` +
      `cache, ${sum.recompiled} recompiled, ${count(sum.breaks, "graph break")}, ${sum.failed} failed.`));
    const columns = ["took>", "dynamo>", "aot>", "backend>", "cache", "pass", "step", "graph"];
    made.append(...table(columns, found.graphs.map((one) => () => {
      const said = [one.failure ? `failed: ${one.failure}` : "",
        one.recompile_reason ? `compiled anew: ${one.recompile_reason}` : "",
        ...one.breaks.map((text) => `graph break: ${text}`),
          ...one.restarts.map((text) => `traced again: ${text}`)].filter(Boolean);
      return h("tr", {}, cells(seconds(one.took), dot(one.dynamo), dot(one.aot_autograd), dot(one.backend)),
        td(null, one.cache || "·"), td("tight", one.direction), nameCell(one.step, one.step ? stepButton(one.step,
          false) : "·"),
        td("wide", one.failure || one.recompile_reason ? h("strong", {}, one.name) : one.name, " ",
          h("span", { class: "site place" }, one.place), said.map((text) => h("div", { class: "faint" }, text))));
    }), "Turns of the compiler"));
  }
  for (const cache of (found.caches || []).slice(0, ROWS)) {
    const role = { leader: "led", follower: `followed rank ${cache.leader}`, alone: "went alone" }[cache.role];
    made.append(note(`Rank ${cache.rank} ${role}; the code was ${cache.hit ? "" : "not "}there` +
      `${cache.why ? ` (${cache.why})` : ""}${cache.waited > SKEW ? `; waited ${seconds(cache.waited)}` : ""}.`));
  }
  if ((found.caches || []).length > ROWS) made.append(note(`and ${found.caches.length - ROWS} more ranks.`));
}

function imports() {
  const made = section("imports", "What was imported");
  const found = DATA.imports;
  if (found.unknown) return made.append(say(`Not known: ${found.unknown}.`));
  const modules = found.packages.reduce((sum, one) => sum + one.modules, 0);
  made.append(say(`Rank ${found.rank}: ${count(modules, "module")} of ${count(found.packages.length, "package")} in ` +
    `${seconds(found.seconds)}, ${seconds(found.cpu)} of it CPU time.`));
  const before = found.imported_before;
  const more = before.length > 12 ? ", ..." : "";
  if (before.length) made.append(note(`Not seen, imported before: ${before.slice(0, 12).join(", ")}${more}.`));
  const needed = { yes: "yes", no: "no~", "": "·" };
  const packages = found.packages.map((one) => () => h("tr", {},
    cells(seconds(one.seconds), seconds(one.total), one.modules), td(null, needed[one.needed]),
    nameCell(one.package, one.package), td("wide site", one.asked)));
  const columns = ["self>", "total>", "modules>", "needed", "package", "asked for by"];
  made.append(...table(columns, packages, "Packages, the longest first"));
  const lines = found.lines.map((one) => () => {
    const idle = one.unneeded.map(([name]) => name).join(", ");
    return h("tr", {}, cells(seconds(one.seconds)),
      nameCell(one.line, [one.line, one.own ? null : h("div", { class: "faint" }, "a library's line")]),
      td("wide", one.packages.slice(0, 6).map(([name, value]) => `${name} ${seconds(value)}`).join(", "),
        idle ? h("div", { class: "faint" }, `not needed~: ${idle}`) : null));
  });
  made.append(h("h3", {}, "By line"), ...table(["took>", "line", "brought in"], lines, "Lines that import"));
}

function optimized() {
  if (!DATA.optimized.length) return;
  const made = section("optimized", "What --optimize did",
    note("Optimized: done, with the training as it was. As it was: left alone, and why."));
  const of = (ranks) => (ranks ? `rank ${ranks}` : DATA.ranks.length > 1 ? "all" : "");
  made.append(...table(["what became of it", "optimization", "how, or why not", "where", "ranks"],
    DATA.optimized.map((one) => () => h("tr", {},
      td("tight", one.applied ? h("strong", {}, "Optimized") : "As it was"), td("tight", one.name),
      td("wide", one.text), td("site", place(one.place)), td("tight", of(one.ranks)))), "What --optimize did"));
  made.append(h("h3", {}, "Advice: what the script could do itself"));
  const tips = DATA.summary.advice;
  if (!tips.length) return made.append(say("None."));
  made.append(...table(["saves>", "where", "what"], tips.map((tip) => () => h("tr", {},
    cells(tip.saves === null ? "·" : about(tip.saves)), td("site", place(tip.place || "the script")),
    td("wide", tip.text))), "What the script could do itself"));
}

function advice() {
  const made = section("advice", "Advice: what the first batch did not need");
  const found = DATA.defer;
  if (found.unknown) return made.append(say(`Not known: ${found.unknown}.`));
  if (found.findings.length) {
    const open = found.findings.filter((one) => one.saves === null).length;
    const without = open ? `, without the ${open} whose saving is not known` : "";
    made.append(say(found.saves === null ? "What they save is not known: the time of their own was not recorded."
      : `Together ${about(found.saves)}, simulated with all of them after the first batch${without}.`));
    const rows = found.findings.map((one) => () => {
      const kept = one.kept.slice(0, 5).join(", ");
      const provided = kept ? [...one.provided, `keeps ${kept}, which it also brought in`] : one.provided;
      return h("tr", {}, cells(dot(one.took), about(one.saves)),
        nameCell(one.what, one.kind === "step" ? stepButton(one.what, false) : one.what),
        td("site", place(one.place, one.step && one.kind !== "step" ? `, in step ${one.step}` : "")),
        td("wide", h("ul", {}, provided.map((text) => h("li", {}, text)))));
    });
    made.append(...table(["took>", "saves>", "what", "where", "holds if"], rows, "What could come later"));
  } else made.append(say("Nothing was found that the first batch did not need."));
  const names = { steps: "steps and their values", loaders: "data loaders", groups: "process groups",
    imports: "imports" };
  made.append(note(`Looked at: ${found.looked_at.map((what) => names[what]).join(", ") || "nothing"}.`));
  for (const [what, why] of Object.entries(found.not_looked_at)) made.append(note(`Not at ${names[what]}: ${why}.`));
}

function leftOut() {
  section("left-out", "What this page leaves out", h("ul", {}, DATA.left_out.map((text) => h("li", {}, text))),
    note(`Made from ${DATA.path} by initopt report --html. A number with ~ is an estimate.`));
}
