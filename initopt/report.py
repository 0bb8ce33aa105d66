"""One start-up in words and tables for a terminal, and the same data as JSON. It only reads.

Every view is a function from a run to a `View`: the lines to print and the data behind them. An estimate carries `~`,
and the labels of the run (such as what was emulated) are part of every view. It does not draw on a time axis (see
`picture`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from rich.text import Text

from initopt import bench
from initopt.advice import advice
from initopt.chain import (
    SKEW,
    UNNAMED,
    Link,
    critical_chain,
    finished_ranks,
    median_rank,
    slowest_rank,
    split,
    steps_of,
)
from initopt.chain import seconds as seconds
from initopt.chain import sentence as sentence
from initopt.compiles import cache_use, compiled_in, compiled_on, sharing, total
from initopt.deferral import findings, together
from initopt.ett import JOBS, LOST_WORK, NOT_COUNTED, Job, ett, gain, time_to_recover
from initopt.planned import per_step, planned, work
from initopt.rank_numbers import ranks_in_short
from initopt.record import Watched
from initopt.runs import RecordError, last_step
from initopt.terminal_lines import LONGEST, QUIET, count, next_verbs, table, wrap

if TYPE_CHECKING:
    from initopt.imports import ImportLine
    from initopt.record import Compiled, Span
    from initopt.runs import Run

JSON_VERSION = 1
"""Version of the data of every view. It changes when a key is renamed or changes its meaning, not when one is added."""

_BLAME_ROWS = 10
_IMPORT_ROWS = 12
_PLACE = re.compile(r"(until )?\S+:\d+(-\d+)?")
"""What a step is called that has no name: where it is."""

_CORES_FULL = 0.7
"""The part of a start-up that its CPU work, spread over all cores, must fill before the summary speaks of it."""


@dataclass(frozen=True, slots=True)
class View:
    """What one command shows: `lines` for a terminal, `data` for `--json`."""

    lines: tuple[Text, ...]
    data: dict[str, Any]
    finding: bool = False
    """Whether there is something wrong in it, for the exit code."""

    @property
    def plain(self) -> str:
        """The lines without colour."""
        return "\n".join(line.plain for line in self.lines)


@dataclass(frozen=True, slots=True)
class Row:
    """One step in `blame`, times in seconds. `slack` is None without a graph, `compiling` a part of `work`."""

    step: str
    lane: str
    took: float
    work: float
    wait: float
    slack: float | None
    note: str = ""
    compiling: float = 0.0


def summary(run: Run, *, width: int = 80) -> View:
    """The one sentence: when the first batch was done and what that time was made of."""
    data = about(run)
    if not finished_ranks(run):
        return _unfinished(run, data, width)
    median, slowest = median_rank(run), slowest_rank(run)
    parts = split(run, median)
    data.update(
        median_rank=median,
        slowest_rank=slowest,
        first_batch={str(rank): run.first_batch(rank) for rank in finished_ranks(run)},
        work=parts.work,
        wait=parts.wait,
        queue=parts.queue,
        total=parts.total,
        planned=None,
        core_bound=run.core_bound,
        compile=_compile_data(run, median),
        notes=[asdict(note) for note in run.notes],
    )
    lines = _head(run, width)
    first = Text.assemble(f"{run.goal[:1].upper()}{run.goal[1:]} after ", (seconds(parts.total), "bold"))
    if len(finished_ranks(run)) > 1:
        first.append(f" (median rank {median}; slowest, rank {slowest}: {seconds(run.first_batch(slowest))})")
    lines += wrap(first, width)
    launched = run.headers[median].after_launcher
    if launched:
        lines += wrap(f"{seconds(parts.total + launched)} after its launcher (such as torchrun) began", width, QUIET)
    meaning = {
        "work": "the longest chain of steps that need each other",
        "wait": "for slower ranks",
        "queue": "the chain stood still behind other steps",
    }
    if run.graph is None:
        meaning["work"] = "all steps, as one sequence: this run has no graph"
        if parts.queue < SKEW:
            meaning["queue"] = "not known without a graph"
    for name, style in (("work", LONGEST), ("wait", "yellow"), ("queue", "cyan")):
        value = "·" if meaning[name].startswith("not known") else seconds(data[name])
        lines.append(Text.assemble(f"{value:>9}  ", (f"{name:<6}", style), f"  {meaning[name]}"))
    lines.append(Text())
    lines += _notes(run, width)
    if data["compile"] is not None:
        lines += wrap(_compile_line(run, median), width)
        lines += _warned(_compiled_elsewhere(run, median), width)
    if run.graph is not None:
        last = last_step(planned(run, median), run.graph, run.end)
        assert last is not None, "the median rank has finished"
        lanes = len(run.graph.lanes())
        data["planned"] = last.end
        on = f"{lanes} {'lane' if lanes == 1 else 'lanes'}"
        lines += wrap(f"Planned with this graph on {on}, nobody waiting: ~{seconds(last.end)}", width)
    if run.core_bound > _CORES_FULL * parts.total:
        full = f"CPU work that fills all cores of the host for {seconds(run.core_bound)}: overlap can't go below that"
        lines += wrap(full, width)
    found = [one for one in findings(run) if one.worth_saying]
    data["not_needed"] = [asdict(one) for one in found]
    if found:
        whole = together(run) if any(f.saves for f in found) else None
        saves = f": ~{seconds(max(0.0, whole))} sooner without" if whole is not None else ""
        lines += wrap(f"The first batch did not need {count(len(found), 'thing')} before it{saves} (defer)", width)
    if run.optimized:
        lines += [Text()] if lines[-1].plain else []
        lines += _optimized(run, data, width)
    lines.append(Text(f"Recording itself cost {seconds(run.own_cost)} of CPU time", style=QUIET))
    more = [*(["compile"] if data["compile"] is not None else []), *(["imports"] if run.imported else [])]
    more += ["defer"] if found else []
    # All of them would not fit into a line.
    lines += next_verbs(width, *["blame", "critical-chain", *more, "plot"][: 4 if more else 3])
    return View(tuple(lines), data)


def blame_rows(run: Run, rank: int) -> list[Row]:
    """The steps of one rank, the longest first."""
    slack = run.graph.slack(per_step(run, rank, waits=True)) if run.graph is not None else {}
    inside = compiled_in(run, rank)
    within: dict[str, list[Span]] = {}
    for one in sorted(run.of_rank(rank), key=lambda span: span.start - span.end):
        if one.kind in ("import", "step") and one.step:
            within.setdefault(one.step, []).append(one)
    rows = []
    for span in steps_of(run, rank):
        compiling = sum(one.end - one.start for one in inside.get((span.name, span.start), ()))
        notes = [f"failed: {span.error}" if span.error else _why(run, span)]
        notes.append(f"{seconds(compiling)} compiling" if compiling > SKEW else "")
        parts: dict[str, float] = {}
        for one in within.get(span.name, ()):
            if one.kind == "import" or span.start <= one.start <= span.end:
                parts[one.name] = parts.get(one.name, 0.0) + one.end - one.start
        longest = sorted(parts.items(), key=lambda item: -item[1])[:2]
        notes += [f"{part} {seconds(value)}" for part, value in longest if value >= SKEW]
        took, alone, note = span.end - span.start, work(span), ", ".join(note for note in notes if note)
        rows.append(Row(span.name, span.lane, took, alone, span.wait, slack.get(span.name), note, compiling))
    return sorted(rows, key=lambda row: -row.took)


def blame(run: Run, rank: int | None = None, *, everything: bool = False, width: int = 80) -> View:
    """The steps of one rank (the median one by default), slowest first, work and wait apart."""
    rank = chosen_rank(run, rank)
    rows = blame_rows(run, rank)
    data = {**about(run), "rank": rank, "steps": [asdict(row) for row in rows]}
    shown = rows if everything else rows[:_BLAME_ROWS]
    with_slack = run.graph is not None
    names = max([4, *(len(row.step) for row in shown)])
    lanes = max([4, *(len(row.lane) for row in shown)])
    left = 24 + (8 if with_slack else 0) + 2 + names + 2 + lanes + 2
    notes = max((len(row.note) for row in shown), default=0)
    beside = width - left - notes - 2 >= 12
    bar = max(4, min(24, width - left - (notes + 2 if beside else 0)))
    scale = bar / max([row.took for row in shown if row.took > 0], default=1.0)

    lines = [*_head(run, width), *_where_it_ended(run, rank, width)]
    which = " (the median)" if finished_ranks(run) and rank == median_rank(run) else ""
    lines += wrap(f"Rank {rank}{which if len(run.headers) > 1 else ''}, the longest step first", width)
    slack_head = "   slack" if with_slack else ""
    lines.append(Text(f"    took    work    wait{slack_head}  {'step':<{names}}  lane", style=QUIET))
    for row in shown:
        style = LONGEST if row.slack is not None and row.slack < SKEW else ""
        line = Text(f"{seconds(row.took):>8}{seconds(row.work):>8}{_dot(row.wait):>8}")
        if with_slack:
            line.append(f"{'·' if row.slack is None else seconds(row.slack):>8}")
        line.append(f"  {row.step:<{names}}", style=style)
        line.append(f"  {row.lane:<{lanes}}  ", style=QUIET)
        whole = max(1, round(row.took * scale)) if row.took > 0 else 0
        waiting = min(whole, round(row.wait * scale))
        compiling = min(whole - waiting, round(row.compiling * scale))
        line.append("█" * (whole - waiting - compiling), style=style or "white")
        line.append("▒" * compiling, style=style or "white")
        line.append("░" * waiting, style="yellow")
        if row.note and beside:
            line.append(" " * (bar - whole + 2) + row.note)
        line.rstrip()
        lines.append(line)
        if row.note and not beside:
            at = left - lanes - names - 4
            lines += wrap(f"{'':>{at}}  └ {row.note}", width, QUIET, rest=at + 4)
    if len(rows) > len(shown):
        rest = rows[len(shown) :]
        more = f"{len(rest)} more {'step' if len(rest) == 1 else 'steps'}"
        lines.append(Text(f"{more}, {seconds(sum(row.took for row in rest))} together (--all)", style=QUIET))
    lines.append(Text())
    compiled = any(row.compiling > SKEW for row in shown)
    lines += wrap(f"█ work  {'▒ of it compiling  ' if compiled else ''}░ wait for other ranks", width, QUIET)
    if with_slack:
        lines += wrap("slack: a step may grow by this much before the graph's longest chain grows", width, QUIET)
    lines += next_verbs(
        width, *(("critical-chain",) if finished_ranks(run) else ()), "plot", *(("compile",) if compiled else ())
    )
    return View(tuple(lines), data)


def chain_view(run: Run, rank: int | None = None, *, width: int = 80) -> View:
    """The chain of steps that decided the first batch of `rank`, the slowest unless given, as a tree, last step first.

    Raises RecordError for a rank that is not there or did not reach its first batch.
    """
    links = critical_chain(run, None if rank is None else chosen_rank(run, rank))
    inside = {rank: compiled_in(run, rank) for rank in {link.rank for link in links}}
    compiling = [_compiling(link, inside[link.rank]) for link in links]
    chain = [{**asdict(link), "compiling": spent} for link, spent in zip(links, compiling, strict=True)]
    data = {**about(run), "chain": chain}
    total = run.first_batch(links[0].rank)
    pairs = zip(links, compiling, strict=True)
    shown = [(link, spent) for link, spent in pairs if link.step != UNNAMED or link.took > 0.01 * total]
    deep = 2 if 2 * len(shown) <= width // 2 else (1 if len(shown) <= width // 2 else 0)

    lines = _head(run, width)
    lines.append(Text("@ when it began   + how long it took   ⋯ queued   (rank that decided)", QUIET))
    lines.append(Text())
    several = len(run.headers) > 1
    before: Link | None = None
    for depth, (link, spent) in enumerate(shown):
        indent = " " * (deep * (depth - 1)) if depth else ""
        line = Text.assemble((indent + ("└─" if depth else ""), QUIET))
        line.append(link.step, style=LONGEST if link.step != UNNAMED else QUIET)
        line.append(f" @{seconds(link.start)} +{seconds(link.took)}")
        if several and (before is None or before.rank != link.rank):
            line.append(f"  (rank {link.rank})", style="bold")
        note = f"{seconds(link.wait)} waiting for rank {link.waited_for}" if link.waited_for is not None else ""
        if note and run.headers[link.waited_for or 0].host != run.headers[link.rank].host:
            note += f" (host {run.headers[link.waited_for or 0].host})"
        if spent > SKEW:
            note = ", ".join([f"{seconds(spent)} compiling", *([note] if note else [])])
        under = " " * (deep * depth)
        if note and line.cell_len + 3 + len(note) <= width:
            line.append("   " + note, style="yellow")
            note = ""
        lines.append(line)
        if note:
            lines += [
                Text.assemble((under + "│ ", QUIET), part) for part in wrap(note, width - len(under) - 2, "yellow")
            ]
        if link.queue > max(SKEW, total / 1000):
            who = _behind(link.behind)
            for number, part in enumerate(wrap(f"{seconds(link.queue)} {who}", width - len(under) - 4, "cyan")):
                lines.append(Text.assemble((under + ("│ ⋯ " if number == 0 else "│   "), QUIET), part))
        before = link
    lines.append(Text())
    lines += wrap(_decided(run, links), width)
    lines += next_verbs(width, "blame", "plot")
    return View(tuple(lines), data)


def compile_view(run: Run, rank: int | None = None, *, width: int = 80) -> View:
    """What torch's compiler did on one rank, step by step, and who waited for whom.

    By default it is the rank that compiled for others, or where the code was there already the median one.

    It is a finding where a graph was compiled anew or not at all: on `rank`, or on any where none is asked for.
    """
    everybody = rank is None
    led = [cache.rank for cache in run.compile_caches if cache.role == "leader" and not cache.hit]
    # Whoever compiled has more to show than those that loaded it.
    rank = led[0] if everybody and led else chosen_rank(run, rank)
    turns = compiled_on(run, rank)
    data = {
        **about(run),
        "rank": rank,
        "compile": _compile_data(run, rank),
        "graphs": [{**asdict(one), "took": one.end - one.start, "cache": cache_use(one)} for one in turns],
        "ranks": {str(r): asdict(total(compiled_on(run, r))) for r in run.headers},
        "caches": [asdict(cache) for cache in run.compile_caches],
        "notes": [asdict(note) for note in run.notes],
    }
    lines = [*_head(run, width), *_where_it_ended(run, rank, width)]
    which = " (the median)" if finished_ranks(run) and rank == median_rank(run) else ""
    if turns or run.compile_caches:
        lines += wrap(f"Rank {rank}{which if len(run.headers) > 1 else ''}: {_compile_line(run, rank)}", width)
    if turns:
        lines += [Text(), Text("    took  dynamo     aot backend  cache   pass   graph", style=QUIET)]
        at = ""
        for one in turns:
            if one.step != at or one is turns[0]:
                at = one.step
                lines.append(Text(f"in {at or 'no step'}, on {one.lane}", style="bold"))
            lines += _turn(one, width)
        whole = total(turns)
        lines.append(Text())
        legend = ["aot: AOTAutograd and its cache"]
        legend += [f"backend: {seconds(whole.code_gen)} of it code generation"] if whole.code_gen > SKEW else []
        legend += ["part: lowered anew, its code was there"] if "part" in map(cache_use, turns) else []
        lines += wrap("; ".join(legend), width, QUIET)
    else:
        lines += wrap(f"torch's compiler did nothing on rank {rank}, as far as this was recorded.", width)
    lines += [line for text in _caches(run) for line in wrap(text, width, rest=2)]
    lines += _notes(run, width, stage="compile")
    elsewhere = _compiled_elsewhere(run, rank) if everybody else []
    lines += _warned(elsewhere, width)
    lines += next_verbs(width, "blame", *(("critical-chain",) if finished_ranks(run) else ()))
    return View(tuple(lines), data, finding=bool(elsewhere) or _troubled(run, rank))


def _turn(one: Compiled, width: int) -> list[Text]:
    times = (one.end - one.start, one.dynamo, one.aot_autograd, one.backend)
    passes = {"forward": "fw", "backward": "bw", "both": "fw+bw"}[one.direction]
    line = Text("".join(f"{_dot(time):>8}" for time in times))
    line.append(f"  {cache_use(one) or '·':<6}  {passes:<5}  ")
    bad = one.recompile_reason or one.failure
    name, file = one.name, one.place.rpartition("/")[2]
    line.append(name, style=LONGEST if bad else "")
    if file and line.cell_len + 2 + len(file) <= width:
        line.append(f"  {file}", style=QUIET)
    said = [f"failed: {one.failure}"] if one.failure else []
    said += [f"compiled anew: {one.recompile_reason}"] if one.recompile_reason else []
    said += [f"graph break: {text}" for text in one.breaks] + [f"traced again: {text}" for text in one.restarts]
    style = LONGEST if bad else QUIET
    return [line, *(part for text in said for part in wrap(f"        └ {text}", width, style, rest=10))]


def _compile_data(run: Run, rank: int) -> dict[str, Any] | None:
    """What was compiled on a rank, and who waited; None where neither is known."""
    turns, shared = compiled_on(run, rank), sharing(run)
    if not turns and shared is None:
        return None
    return {**asdict(total(turns)), "sharing": asdict(shared) if shared is not None else None}


def _compile_line(run: Run, rank: int) -> str:
    whole = total(compiled_on(run, rank))
    parts = [count(whole.graphs, "graph"), f"{whole.from_cache} from cache", f"{whole.recompiled} recompiled"]
    parts += [count(whole.breaks, "graph break")] if whole.breaks else []
    parts += [f"{whole.failed} failed"] if whole.failed else []
    line = f"compile {seconds(whole.took)}: {', '.join(parts)}"
    shared = sharing(run)
    said = []
    if shared is not None and shared.leaders:
        said.append(f"{_ranks(shared.leaders)} led")
    if shared is not None and shared.waited > SKEW:
        said.append(f"{_ranks(shared.followers)} waited {seconds(shared.waited)}")
    return "; ".join([line, ", ".join(said)] if said else [line])


def _troubled(run: Run, rank: int) -> bool:
    whole = total(compiled_on(run, rank))
    return bool(whole.recompiled or whole.failed)


def _compiled_elsewhere(run: Run, rank: int) -> list[str]:
    """That other ranks than the one shown compiled anew, which it would hide."""
    others = [other for other in run.headers if other != rank and _troubled(run, other)]
    return [f"{_ranks(others)} compiled anew, or failed to (initopt compile --rank {others[0]})"] if others else []


def _caches(run: Run) -> list[str]:
    """What the ranks said of the compile cache, those that said the same in one sentence."""
    alike: dict[tuple[str, ...], list[int]] = {}
    waited = {cache.rank: cache.waited for cache in run.compile_caches}
    for cache in sorted(run.compile_caches, key=lambda cache: cache.rank):
        role = {"leader": "led", "follower": f"followed rank {cache.leader}", "alone": "went alone"}[cache.role]
        there = f"the code was {'' if cache.hit else 'not '}there{f' ({cache.why})' if cache.why else ''}"
        size = f"{count(cache.files, 'file')}, {cache.bytes / 2**20:.1f} MB" if cache.files else ""
        alike.setdefault((role, there, size), []).append(cache.rank)
    said = []
    for (role, there, size), ranks in alike.items():
        longest = max(waited[rank] for rank in ranks)
        wait = f"waited {'up to ' if len(ranks) > 1 else ''}{seconds(longest)}" if longest > SKEW else ""
        said.append(f"{_ranks(ranks).capitalize()} {role}: {'; '.join(part for part in (there, wait, size) if part)}")
    return said


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_in_short(ranks)}"


def _compiling(link: Link, inside: Mapping[tuple[str, float], Sequence[Span]]) -> float:
    """Seconds of a link in which its step compiled; `inside` are the turns in the steps of its rank."""
    end = link.start + link.took
    turns = inside.get((link.step, link.start), ())
    return sum(min(one.end, end) - one.start for one in turns if one.start < end)


def _no_imports(run: Run, rank: int) -> str:
    if rank not in run.trailers:
        return f"the record of rank {rank} stops before its end, where its imports would be written down"
    if run.watched.get(rank, Watched()).imports == "off":
        return "its imports were not recorded: call initopt.record_imports() before them"
    return f"rank {rank} has imported nothing since its record began"


def imports_view(run: Run, rank: int | None = None, *, everything: bool = False, width: int = 80) -> View:
    """What one rank (the median one by default) imported: by package, and by the line of the trainer that led to it.

    Raises RecordError for a run that did not record it.
    """
    rank = chosen_rank(run, rank)
    packages = [one for one in run.imported if one.rank == rank]
    if not packages:
        raise RecordError(run.path, _no_imports(run, rank))
    by_line = [one for one in run.import_lines if one.rank == rank]
    before = run.watched[rank].before if rank in run.watched else ()
    data = {
        **about(run),
        "rank": rank,
        "seconds": sum(one.seconds for one in packages),
        "cpu": sum(one.cpu for one in packages),
        "packages": [asdict(one) for one in packages],
        "lines": [asdict(one) for one in by_line],
        "imported_before": list(before),
    }
    lines = _head(run, width)
    number = sum(one.modules for one in packages)
    took = f"{count(number, 'module')} of {count(len(packages), 'package')} in {seconds(data['seconds'])}"
    which = " (the median)" if finished_ranks(run) and len(run.headers) > 1 and rank == median_rank(run) else ""
    lines += wrap(f"Rank {rank}{which}: {took}, {seconds(data['cpu'])} of it CPU time", width)
    shown = packages if everything else packages[:_IMPORT_ROWS]
    names = max([7, *(len(one.package) for one in shown)])
    watched = any(one.needed for one in packages)
    needed_head = "  needed" if watched else ""
    lines += [Text(), Text(f"    self   total  modules{needed_head}  {'package':<{names}}  asked for by", style=QUIET)]
    for one in shown:
        needed = f"{_needed(one.needed):>8}" if watched else ""
        line = Text(f"{seconds(one.seconds):>8}{seconds(one.total):>8}{one.modules:>9}{needed}  ")
        line.append(f"{one.package:<{names}}", style=QUIET if one.needed == "no" else "")
        line.append("  " + _clipped(one.asked, width - line.cell_len - 2), style=QUIET)
        line.rstrip()
        lines.append(line)
    if len(packages) > len(shown):
        rest = packages[len(shown) :]
        more = f"{len(rest)} more, {seconds(sum(one.seconds for one in rest))} together (--all)"
        lines.append(Text(more, style=QUIET))
    merged = _merged(by_line)
    for own, head in ((True, "because of this line"), (False, "because of a library's line, none of your own")):
        rows = [one for one in merged if one.own == own]
        if rows:
            lines += [Text(), Text(f"    took  {head}", style=QUIET)]
        for found in rows if everything else rows[:_IMPORT_ROWS]:
            unneeded = f"  {'in part ' if found.needed == 'yes' else ''}not needed~" if found.unneeded else ""
            line = Text(f"{seconds(found.seconds):>8}  ")
            line.append(_clipped(found.line, width - 10 - len(unneeded)), style="" if found.own else QUIET)
            lines.append(line.append(unneeded))
            of_it = ", ".join(f"{name} {seconds(value)}" for name, value in found.packages[:5])
            lines += wrap(f"          └ {of_it}", width, QUIET, rest=12) if of_it else []
    lines.append(Text())
    if before:
        few = f"{', '.join(before[:5])}{', ...' if len(before) > 5 else ''}"
        lines += wrap(f"Not seen, imported before record_imports(): {count(len(before), 'package')} ({few})", width)
    lines += wrap("self: its own code; total: with all that it was the first to import", width, QUIET)
    way = "INITOPT_IMPORTS=used records a start that tells what the first batch needed"
    meaning = "needed: its code ran after its import, or was imported by such code"
    lines += wrap(f"{meaning}; ~ what only reads constants is not seen" if watched else way, width, QUIET)
    lines += next_verbs(width, "defer", "blame") if watched else next_verbs(width, "blame", "plot")
    return View(tuple(lines), data)


def _merged(by_line: Iterable[ImportLine]) -> list[ImportLine]:
    """One for each line, whatever the steps, and one for initopt's own."""
    whole: dict[tuple[str, bool], ImportLine] = {}
    for one in by_line:
        line = "initopt itself" if not one.own and one.line.startswith("initopt/") else one.line
        before = whole.get((line, one.own))
        if before is None:
            whole[line, one.own] = replace(one, line=line)
            continue
        packages, unneeded = dict(before.packages), dict(before.unneeded)
        for into, values in ((packages, one.packages), (unneeded, one.unneeded)):
            for name, value in values:
                into[name] = into.get(name, 0.0) + value
        whole[line, one.own] = replace(
            before,
            seconds=before.seconds + one.seconds,
            packages=tuple(sorted(packages.items(), key=lambda item: -item[1])),
            needed="yes" if "yes" in (before.needed, one.needed) else before.needed,
            unneeded=tuple(unneeded.items()),
        )
    return sorted(whole.values(), key=lambda one: -one.seconds)


def _needed(needed: str) -> str:
    return {"yes": "yes", "no": "no~", "": "·"}[needed]


def _clipped(text: str, room: int) -> str:
    """The end of a place, which says more than its beginning."""
    return text if len(text) <= room else f"…{text[len(text) - max(1, room - 1) :]}"


def defer_view(run: Run, *, width: int = 80) -> View:
    """What stood before the first batch though nothing of it was needed. It is a finding where there is any.

    Raises RecordError for a run in which no rank reached its first batch.
    """
    slowest_rank(run)
    found = findings(run)
    whole = together(run)
    unseen = _not_looked_at(run)
    looked = [what for what in _LOOKED_AT if what not in unseen]
    data = {
        **about(run),
        "findings": [asdict(one) for one in found],
        "saves": whole,
        "looked_at": looked,
        "not_looked_at": unseen,
    }
    lines = _head(run, width)
    said_of = [f"Looked at: {', '.join(_LOOKED_AT[what] for what in looked) or 'nothing'}."]
    for why in dict.fromkeys(unseen.values()):
        said_of.append(f"Not at {' and '.join(_LOOKED_AT[what] for what in unseen if unseen[what] == why)}: {why}.")
    before = max((len(run.watched[rank].before) for rank in finished_ranks(run) if rank in run.watched), default=0)
    if before and "imports" in looked:
        said_of.append(f"Not at {count(before, 'package')} that were there before imports were watched.")
    looked_at = [line for text in said_of for line in wrap(text, width, QUIET)]
    if not found:
        lines += wrap("Nothing was found that the first batch did not need.", width)
        lines += [Text(), *looked_at, *next_verbs(width, "blame")]
        return View(tuple(lines), data)
    lines.append(Text("    took   saves  what the first batch did not need", style=QUIET))
    for one in found:
        saves = "?" if one.saves is None else f"~{seconds(max(0.0, one.saves))}"
        line = Text(f"{_dot(one.took):>8}{saves:>8}  ")
        line.append(_clipped(one.what, width - 20), style=LONGEST)
        lines.append(line)
        step = f", in step {one.step}" if one.step and one.kind != "step" else ""
        lines += wrap(f"{'':>18}{one.place}{step}", width, QUIET, rest=20)
        if one.kept:
            few = f"{', '.join(one.kept[:5])}{', ...' if len(one.kept) > 5 else ''}"
            lines += wrap(f"{'':>18}keeps {few}, which it also brought in", width, QUIET, rest=20)
        for text in one.provided:
            lines += wrap(f"{'':>18}if {text}", width, QUIET, rest=20)
    lines.append(Text())
    open_ = sum(one.saves is None for one in found)
    if whole is None:
        lines += wrap("What they save is not known: the time of their own was not recorded.", width, "bold")
    else:
        left = f", without the {open_} whose saving is not known" if open_ else ""
        said = f"Together ~{seconds(max(0.0, whole))}, simulated with all of them after the first batch{left}."
        lines += wrap(said, width, "bold")
        lines += wrap("A saving is 0 where the step was not on the chain that decided.", width, QUIET)
    lines += [*looked_at, *next_verbs(width, *(("imports",) if run.imported else ()), "critical-chain")]
    return View(tuple(lines), data, finding=True)


_LOOKED_AT = {
    "steps": "steps and their values",
    "loaders": "data loaders",
    "groups": "process groups",
    "imports": "imports",
}


def _not_looked_at(run: Run) -> dict[str, str]:
    """Of what `defer` looks for, what it could not see in this run, each with the reason."""
    watched = [run.watched.get(rank, Watched()) for rank in finished_ranks(run)]
    unseen = {} if run.graph is not None else {"steps": "there is no graph"}
    if not all(one.objects for one in watched):
        why = "recorder.collectives() watches them, from before they are made to the end of the first step"
        unseen |= {"loaders": why, "groups": why}
    missing = [one for one in watched if one.imports != "used"]
    if missing:
        one = missing[0]
        if one.imports == "off":
            called = "initopt.record_imports() was not called before the recorder was made"
            unseen["imports"] = called if one.used else f"{called}, and INITOPT_IMPORTS is not used"
        else:
            unseen["imports"] = "another profiler was on" if one.used else "INITOPT_IMPORTS=used watches them"
    return unseen


def ett_view(
    run: Run,
    baseline: Run | None = None,
    *,
    jobs: Sequence[Job] = JOBS,
    lost_work: float = LOST_WORK,
    width: int = 80,
) -> View:
    """The share of a job's wall time spent on new data with this start-up, and the gain over `baseline`."""
    # Imports that a launcher does for all ranks come before a rank has begun.
    launched = all(one.after_launcher for one_run in filter(None, (run, baseline)) for one in one_run.headers.values())
    since = "launcher" if launched else "worker"
    start = _time_to_start(run, launched)
    ranks = len(run.headers)
    data = {**about(run), "time_to_start": start, "lost_work": lost_work, "baseline": None, "not_counted": NOT_COUNTED}
    data["since"] = since
    lines = _head(run, width)
    if baseline is not None:
        new = [line for line in _label_lines(baseline, width) if line not in lines]
        lines[-1:-1] = new
    lines.append(Text("ETT% = 1 - (TTS + failures x TTR) / wall", style="bold"))
    rows: list[tuple[str, ...]]
    if baseline is None:
        lines += wrap(f"TTS, {since} start to first batch of the slowest rank: {seconds(start)}", width)
        shares = [ett(job.wall, start, job.failures, time_to_recover(start, lost_work)) for job in jobs]
        data["jobs"] = [{**asdict(job), "ett": share} for job, share in zip(jobs, shares, strict=True)]
        rows = [("job", "failures", "ETT%")]
        rows += [(job.name, f"{job.failures:g}", f"~{100 * s:.2f}") for job, s in zip(jobs, shares, strict=True)]
    else:
        before = _time_to_start(baseline, launched)
        gains = gain(before, start, jobs, lost_work=lost_work, ranks=ranks)
        data["baseline"] = {**about(baseline), "time_to_start": before}
        data["jobs"] = [
            {**asdict(g.job), "before": g.before, "after": g.after, "points": g.points, "hours_back": g.hours_back}
            for g in gains
        ]
        lines += wrap(
            f"TTS, {since} start to first batch of the slowest rank: {seconds(before)} ({_named(baseline)}) -> "
            f"{seconds(start)} ({_named(run)})",
            width,
        )
        rows = [("job", "failures", "ETT% before -> after", "gain", "rank-hours back")]
        for g in gains:
            change = f"~{100 * g.before:.2f} -> ~{100 * g.after:.2f}"
            rows.append((g.job.name, f"{g.job.failures:g}", change, f"~{g.points:+.2f}", f"~{g.hours_back:.2g}"))
    lines += wrap(f"TTR = TTS + {seconds(lost_work)} of lost work per failure (--lost)", width)
    lines.append(Text())
    lines += table(rows)
    lines.append(Text())
    lines += wrap("Start-up is paid 1 + failures times. Not counted: " + "; ".join(NOT_COUNTED) + ".", width, QUIET)
    lines += next_verbs(width, "bench")
    return View(tuple(lines), data)


def _time_to_start(run: Run, launched: bool) -> float:
    slowest = slowest_rank(run)
    return run.first_batch(slowest) + (run.headers[slowest].after_launcher if launched else 0.0)


def _named(run: Run) -> str:
    return f"{run.headers[min(run.headers)].mode}, run {run.name}"


def bench_view(
    measured: bench.Bench,
    comparison: bench.Comparison | None = None,
    verdict: bench.Verdict | None = None,
    *,
    width: int = 80,
) -> View:
    """A measurement of stock and initopt, and if given its comparison with an earlier one and what a gate found."""
    ranks = f"{measured.ranks} {'rank' if measured.ranks == 1 else 'ranks'}"
    hosts = f"{len(measured.hosts)} {'host' if len(measured.hosts) == 1 else 'hosts'}"
    known = f"bench {measured.name} · {ranks} on {hosts} · {measured.cores} cores · {_moment(measured.taken)}"
    lines = wrap(known, width, "bold")
    lines += wrap(" · ".join(f"{name} {version}" for name, version in measured.versions.items()), width, QUIET)
    lines += _warned(measured.labels, width)
    lines.append(Text())
    rows: list[tuple[str, ...]] = [("first batch", "median", "range", "work", "wait", "queue", "runs")]
    rows += [_side(side, side.name) for side in (measured.stock, measured.initopt)]
    if comparison is not None and comparison.before is not measured.stock:
        rows.append(_side(comparison.before, comparison.before_name))
    lines += [*table(rows), Text()]

    ratio = measured.ratio
    pairs = f"{len(measured.stock.samples)} {'pair' if len(measured.stock.samples) == 1 else 'pairs'}"
    faster = f"{ratio.median:.2f} times as fast as stock ({ratio.min:.2f} ... {ratio.max:.2f} in {pairs})."
    lines += wrap(faster, width, "bold")
    slowest = f"{seconds(measured.stock.slowest)} -> {seconds(measured.initopt.slowest)}"
    lines += wrap(f"Slowest rank {slowest} (medians).", width)
    lines += wrap(_trained(measured.state), width)
    data: dict[str, Any] = {**json.loads(measured.to_json()), "version": JSON_VERSION, "comparison": None, "gate": None}
    warnings = list(measured.warnings)
    if comparison is not None:
        change = comparison.change()
        chance = "; the ranges overlap, so it may be chance" if comparison.overlaps else ""
        if comparison.before is not measured.stock:
            said = f"{comparison.after_name} is {abs(change):.1%} {'slower' if change > 0 else 'faster'} than"
            lines += wrap(f"{said} {comparison.before_name}{chance}.", width)
        warnings += [warning for warning in comparison.warnings if warning not in warnings]
        data["comparison"] = {"before": comparison.before_name, "change": change, "overlaps": comparison.overlaps}
    if verdict is not None:
        unit = verdict.gate.unit
        found = f"{verdict.gate.metric} changed by {verdict.change:+.1f}{unit}"
        word = "passed" if verdict.passed else "FAILED"
        lines += wrap(f"Gate {word}: {found}, the gate is '{verdict.gate}'.", width, "" if verdict.passed else LONGEST)
        if not verdict.passed:
            grown = [f"{g.step} {seconds(g.before)} -> {seconds(g.after)}" for g in verdict.grown[:3]]
            lines += wrap("Grew most: " + (", ".join(grown) or "no single step"), width)
        data["gate"] = {"text": str(verdict.gate), "passed": verdict.passed, "change": verdict.change}
    data["warnings"] = warnings
    lines += _warned(warnings, width)
    lines += next_verbs(width, "ett", "bench --compare NNNN")
    finding = measured.state.verdict == "different" or (verdict is not None and not verdict.passed)
    return View(tuple(lines), data, finding)


def _side(side: bench.Side, name: str) -> tuple[str, ...]:
    spread, parts = side.first_batch, side.parts
    span = f"{seconds(spread.min)} ... {seconds(spread.max)}"
    split_up = (seconds(parts[part]) for part in ("work", "wait", "queue"))
    return (name, seconds(spread.median), span, *split_up, str(len(side.samples)))


def _trained(state: bench.State) -> str:
    count = f"{state.count} {'digest' if state.count == 1 else 'digests'}"
    if state.verdict == "identical":
        return f"Trained state identical on all ranks (sha256, {count} a run)."
    if state.verdict == "unknown":
        return "Trained state not compared: the runs left no digest (Recorder.digest)."
    if state.verdict == "unsteady":
        return "Trained state not comparable: stock itself differs from run to run."
    return f"Trained state DIFFERS from stock: {len(state.differs)} of {count}."


def _moment(unix: float) -> str:
    return f"{datetime.fromtimestamp(unix, timezone.utc):%Y-%m-%d %H:%M} UTC"


def chosen_rank(run: Run, rank: int | None) -> int:
    """The rank to show: `rank`, else the median one, else the first that something ended, else the lowest.

    Raises RecordError for one that is not there.
    """
    if rank is None:
        if finished_ranks(run):
            return median_rank(run)
        ended = (one for one, trailer in sorted(run.trailers.items()) if trailer.ended is not None)
        first = run.first_to_fail
        return next(ended, min(run.headers)) if first is None else first
    if rank not in run.headers:
        raise RecordError(run.path, f"there is no rank {rank}; recorded are {ranks_in_short(sorted(run.headers))}")
    return rank


def title(run: Run) -> str:
    """Who ran what where: job, mode, ranks, hosts, number, time and commit."""
    header = run.headers[min(run.headers)]
    hosts = len({h.host for h in run.headers.values()})
    began = min(header.process_start for header in run.headers.values())
    ranks = f"{header.world_size} {'rank' if header.world_size == 1 else 'ranks'}"
    parts = [
        header.job,
        header.mode,
        f"{ranks} on {hosts} {'host' if hosts == 1 else 'hosts'}",
        f"run {run.name}",
        _moment(began),
        header.commit[:7],
    ]
    return " · ".join(part for part in parts if part)


def labels(run: Run) -> tuple[str, ...]:
    """What must be said with every number of this run, each once."""
    return tuple(dict.fromkeys(label for header in run.headers.values() for label in header.labels))


def about(run: Run) -> dict[str, Any]:
    """What `--json` says of the run itself, in every view."""
    header = run.headers[min(run.headers)]
    return {
        "version": JSON_VERSION,
        "run": run.number or None,
        "name": run.name,
        "path": str(run.path),
        "job": header.job,
        "mode": header.mode,
        "world_size": header.world_size,
        "hosts": sorted({h.host for h in run.headers.values()}),
        "commit": header.commit,
        "versions": dict(header.versions or {}),
        "labels": list(labels(run)),
        "warnings": list(run.warnings),
        "missing_ranks": list(run.missing_ranks),
        "own_cost": run.own_cost,
    }


def _head(run: Run, width: int) -> list[Text]:
    lines = wrap(title(run), width, "bold")
    lines += _label_lines(run, width)
    lines += _warned(run.warnings, width)
    if run.missing_ranks:
        which = "ranks" if len(run.missing_ranks) > 1 else "rank"
        lines += _warned([f"no record of {which} {ranks_in_short(run.missing_ranks)}"], width)
    return [*lines, Text()]


def _label_lines(run: Run, width: int) -> list[Text]:
    return _warned(labels(run), width)


def _warned(warnings: Iterable[str], width: int) -> list[Text]:
    return [line for warning in warnings for line in wrap(f"! {warning}", width, "yellow", rest=2)]


def optimized(run: Run) -> list[dict[str, Any]]:
    """What `initopt.run --optimize` did, then what it left alone and why; what several ranks say once.

    `ranks` are those that said it, in short, empty where all did.
    """
    said: dict[tuple[bool, str, str, str], set[int]] = {}
    for one in sorted(run.optimized, key=lambda one: not one.applied):
        said.setdefault((one.applied, one.name, one.text, one.place), set()).add(one.rank)
    return [
        {"applied": applied, "name": name, "text": text, "place": place}
        | {"ranks": "" if len(ranks) == len(run.headers) else ranks_in_short(sorted(ranks))}
        for (applied, name, text, place), ranks in said.items()
    ]


def _optimized(run: Run, data: dict[str, Any], width: int) -> list[Text]:
    """What was optimized and what was not, and what the script could do itself."""
    could = advice(run)
    data["optimized"] = [asdict(one) for one in run.optimized]
    data["advice"] = [asdict(one) for one in could]
    lines = []
    for one in optimized(run):
        at = f" ({one['place']})" if one["place"] else ""
        which = f", rank {one['ranks']}" if one["ranks"] else ""
        title = "Optimized" if one["applied"] else "As it was"
        lines += wrap(f"{title:<9}  {one['name']}: {one['text']}{at}{which}", width, rest=11)
    for tip in could:
        saves = "·" if tip.saves is None else f"~{seconds(tip.saves)}"
        lines += wrap(f"{'Advice':<9}  {tip.place or 'the script'}: {saves}  {tip.text}", width, rest=11)
    lines.append(Text())
    return lines


def _unfinished(run: Run, data: dict[str, Any], width: int) -> View:
    first = run.first_to_fail if len(run.headers) > 1 else None
    failed = f" Rank {first} failed first:" if first is not None else ""
    lines = [*_head(run, width), *wrap(f"No rank reached its {run.goal}.{failed}", width, LONGEST)]
    at = {}
    for rank in sorted(run.headers, key=lambda rank: (rank != first, rank)):
        last = stopped(run, rank)
        if last is not None:
            at[str(rank)] = last
            lines += wrap(f"rank {rank}: {last['said']}", width, first=2, rest=4)
    data["stopped"], data["first_to_fail"] = at, first
    lines += _notes(run, width)
    if run.optimized:
        lines += [Text(), *_optimized(run, data, width)]
    lines += next_verbs(width, "blame")
    return View(tuple(lines), data, finding=True)


def _where_it_ended(run: Run, rank: int, width: int) -> list[Text]:
    """Of a start-up in which no rank got to its end: that it is one, and what this rank came to."""
    if finished_ranks(run):
        return []
    ended = stopped(run, rank)
    said = f" Rank {rank}: {ended['said']}" if ended is not None else ""
    return wrap(f"No rank reached its {run.goal}.{said}", width, LONGEST)


def stopped(run: Run, rank: int) -> dict[str, Any] | None:
    """What has ended a rank's script, else the step that failed or ended last there. None where neither is known.

    That is the step's name, the seconds from the rank's start, the error and a sentence (`said`).
    """
    trailer = run.trailers.get(rank)
    if trailer is not None and trailer.ended is not None:
        step, end, error = trailer.ended.step, trailer.ended.at, trailer.ended.error
    else:
        steps = steps_of(run, rank)
        if not steps:
            return None
        # Handlers at the script's exit import, too.
        last = max(steps, key=lambda span: (bool(span.error), not span.name.startswith("import "), span.end))
        step, end, error = last.name, last.end - run.zero[rank], last.error
    named = f"in step {step!r}, " if step and not _PLACE.fullmatch(step) else ""
    said = f"{error} ({named}after {seconds(end)})"
    if not error:
        said = f"last recorded step {step!r} ended after {seconds(end)}"
    return {"step": step, "end": end, "error": error, "said": said}


def _notes(run: Run, width: int, *, stage: str | None = None) -> list[Text]:
    """The remarks of all ranks, each once; of the steps of one stage if one is given."""
    steps = {span.name for span in run.spans if stage in (None, span.stage) and span.kind == "step"}
    notes = [note for note in run.notes if stage is None or note.step in steps]
    said = dict.fromkeys(f"{note.step}: {note.text}" if note.step else note.text for note in notes)
    return [line for text in said for part in text.splitlines() for line in wrap(part, width)]


def _why(run: Run, span: Span) -> str:
    """For whom a step waited, and what that rank was doing."""
    if span.wait <= SKEW:
        return ""
    inside = (c for c in run.of_rank(span.rank) if c.kind == "collective" and span.start <= c.start <= span.end)
    mine = max((c for c in inside if span.name == c.step or span.lane == c.lane), key=lambda c: c.wait, default=None)
    if mine is None:
        return ""
    last = max((c for c in run.meeting(mine) if c.start <= mine.end), key=lambda call: call.start)
    if last.rank == span.rank:
        return ""
    busy = [s for s in steps_of(run, last.rank) if s.start <= mine.start < s.end and s.name != span.name]
    if run.graph is not None and span.name in run.graph:
        needs = {edge.before for edge in run.graph.predecessors(span.name) if edge.kind != "resource"}
        busy = [s for s in busy if s.name in needs or s.lane == last.lane or s.kind == "import"]
    where = repr(busy[-1].name) if busy and " " in busy[-1].name else busy[-1].name if busy else ""
    return f"rank {last.rank} was in {where}" if busy else f"last: rank {last.rank}"


def _behind(steps: Sequence[str]) -> str:
    if not steps:
        return "nothing recorded was in the way"
    more = f" and {len(steps) - 4} more" if len(steps) > 5 else ""
    return "behind " + ", ".join(steps[:4] if more else steps) + more


def _decided(run: Run, links: Sequence[Link]) -> str:
    met: dict[int, int] = {}
    for link in links:
        if link.waited_for is not None:
            met[link.waited_for] = met.get(link.waited_for, 0) + 1
    said = []
    if met:
        rank = max(met, key=lambda r: (met[r], -r))
        of = sum(met.values())
        said.append(f"Rank {rank} decided {met[rank]} of {of} {'collective' if of == 1 else 'collectives'}.")
    elif len(run.headers) > 1:
        said.append(f"No collective held it up: rank {links[0].rank} decided alone.")
    if run.graph is not None:
        on_chain = {link.step for link in links}
        slack = run.graph.slack(per_step(run, links[0].rank, waits=True))
        near = min((s for s in slack if s not in on_chain and slack[s] > SKEW), key=lambda s: slack[s], default=None)
        if near is not None:
            said.append(f"Nearest other chain of the graph: through {near}, {seconds(slack[near])} shorter.")
    return " ".join(said)


def _dot(value: float) -> str:
    return "·" if value < 0.0005 else seconds(value)


def versions(run: Run) -> Mapping[str, str]:
    """The library versions of the lowest rank."""
    return run.headers[min(run.headers)].versions or {}
