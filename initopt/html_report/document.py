"""All that the page shows of a run, as one JSON value: what other views print, and the lanes of as many ranks as fit.

It computes nothing that another view has: it collects, and says what it left out.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from statistics import median_low
from typing import TYPE_CHECKING, Any

from initopt import picture, report
from initopt.chain import SKEW, critical_chain, finished_ranks, median_rank, sentence, slowest_rank, split, steps_of
from initopt.collectives_view import collectives_view, verify_view
from initopt.planned import work
from initopt.rank_numbers import ranks_in_short
from initopt.runs import RecordError

if TYPE_CHECKING:
    from initopt.graph import Graph
    from initopt.runs import Run

_BARS = 30_000
"""So many bars at most: a page with more takes long to open. The median rank is there whatever it has."""

DRAWN_STEPS = 200
"""Steps of the largest graph that is drawn as a whole; of a larger one the page shows the neighbours of a step."""

_MEETINGS = 8
_DIFFERENCES = 3

Json = dict[str, Any]


def document(run: Run) -> Json:
    """What the page shows. `sentence` is None where no rank reached its first batch."""
    done = finished_ranks(run)
    known = report.about(run)
    summary = report.summary(run)
    spent = {rank: _per_step(run, rank) for rank in run.headers}
    typical = _typical(spent, done or list(run.headers))
    lanes, left_out = _lanes(run)

    def own(view: Callable[[Run], report.View]) -> Json:
        try:
            data = view(run).data
        except RecordError as error:
            return {"unknown": str(error).removeprefix(f"{run.path}: ")}
        return {key: value for key, value in data.items() if key not in known}

    return {
        **known,
        "title": report.title(run),
        "goal": run.goal,
        "sentence": sentence(run) if done else None,
        "shown_rank": _by_interest(run)[0],
        "median_rank": median_rank(run) if done else None,
        "slowest_rank": slowest_rank(run) if done else None,
        "summary": {key: value for key, value in summary.data.items() if key not in (*known, "optimized")},
        "optimized": report.optimized(run),
        "lanes": lanes,
        "graph": _graph(run),
        "typical": typical,
        "chain": own(report.chain_view),
        "collectives": _collectives(own(collectives_view)),
        "verify": own(verify_view),
        "ranks": _ranks(run, spent, typical),
        "missing": ranks_in_short(run.missing_ranks),
        "compile": own(report.compile_view),
        "imports": own(report.imports_view),
        "defer": own(report.defer_view),
        "left_out": [*left_out, *_left_out(run)],
    }


def _per_step(run: Run, rank: int) -> dict[str, float]:
    """Seconds that each step of a rank worked, without its waits."""
    spent: defaultdict[str, float] = defaultdict(float)
    for span in steps_of(run, rank):
        spent[span.name] += work(span)
    return spent


def _typical(spent: Mapping[int, Mapping[str, float]], ranks: Iterable[int]) -> dict[str, Json]:
    """Of each step the work on the fastest, the median and the slowest rank."""
    by_step: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for rank in ranks:
        for name, value in spent[rank].items():
            by_step[name].append((value, rank))
    found = {}
    for name, values in by_step.items():
        slowest = max(values, key=lambda one: (one[0], -one[1]))
        middle = median_low(value for value, _ in values)
        found[name] = {"least": min(values)[0], "median": middle, "most": slowest[0], "slowest": slowest[1]}
    return found


def _ranks(run: Run, spent: Mapping[int, Mapping[str, float]], typical: Mapping[str, Json]) -> list[Json]:
    """Every rank with a record: those that failed, others that stopped, then the slowest first."""
    done = finished_ranks(run)
    usual = _usual(run)
    rows: list[Json] = []
    for rank in run.headers:
        steps = {**dict.fromkeys(typical, 0.0), **spent[rank]}
        apart = [(name, value - typical[name]["median"]) for name, value in steps.items() if name in typical]
        apart = sorted((one for one in apart if abs(one[1]) > SKEW), key=lambda one: -abs(one[1]))
        row: Json = {"rank": rank, "host": run.headers[rank].host}
        row |= {"differs": apart[:_DIFFERENCES], "odd": _odd(run, rank, usual)}
        if rank in done:
            row |= {**asdict(split(run, rank)), "first_batch": run.first_batch(rank)}
        else:
            row |= {"first_batch": None, "stopped": report.stopped(run, rank), "stuck": _stuck(run, rank)}
        rows.append(row)
    return sorted(rows, key=lambda row: (*_standing(row), row["rank"]))


def _standing(row: Json) -> tuple[int, float]:
    if row["first_batch"] is not None:
        return 2, -row["first_batch"]
    return (0 if row["stopped"] and row["stopped"]["error"] else 1), 0.0


def _surroundings(run: Run, rank: int) -> dict[str, str]:
    header = run.headers[rank]
    return {**(header.versions or {}), "commit": header.commit[:7], "cores": str(header.cores), "mode": header.mode}


def _usual(run: Run) -> dict[str, str]:
    """The versions, commit, cores and mode that most ranks have."""
    seen: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for rank in run.headers:
        for name, value in _surroundings(run, rank).items():
            seen[name][value] += 1
    return {name: values.most_common(1)[0][0] for name, values in seen.items()}


def _odd(run: Run, rank: int, usual: Mapping[str, str]) -> list[str]:
    here = _surroundings(run, rank)
    return [f"{name} {here.get(name, 'unknown')}, not {most}" for name, most in usual.items() if here.get(name) != most]


def _stuck(run: Run, rank: int) -> list[str]:
    """The collectives that a rank was in when its record ended."""
    return [
        f"in {one.op} (call {one.sequence} on {one.group or 'world'})"
        f"{f' at {one.call_site}' if one.call_site else ''} since {report.seconds(one.start - run.zero[rank])}"
        for one in run.stuck
        if one.rank == rank
    ]


def _lanes(run: Run) -> tuple[dict[str, Json], list[str]]:
    """The panels and steps of as many ranks as fit, by rank; and what does not fit."""
    order = _by_interest(run)
    shown: dict[str, Json] = {}
    bars = 0
    for rank in order:
        # A plan has about as many bars as the record that it is made of.
        bars += len(steps_of(run, rank)) * (1 if run.graph is None else 2)
        if shown and bars > _BARS:
            break
        shown[str(rank)] = {
            "panels": [_panel(panel) for panel in picture.panels(run, rank)],
            "steps": [_filled(row) for row in report.blame_rows(run, rank)],
        }
    left = sorted(order[len(shown) :])
    if not left:
        return shown, []
    said = (
        f"lanes and steps of {len(left)} ranks ({ranks_in_short(left)}): initopt plot --rank N, initopt blame --rank N"
    )
    return shown, [said]


def _by_interest(run: Run) -> list[int]:
    """The median rank, those that the chain runs through, the fastest, those that stopped, then the slowest first.

    Where no rank came to an end, those that failed are first.
    """
    done = finished_ranks(run)
    behind = [rank for rank in run.headers if rank not in done]
    behind.sort(key=lambda rank: not (report.stopped(run, rank) or {}).get("error"))
    slow = sorted(done, key=lambda rank: (-run.first_batch(rank), rank))
    first: list[int] = []
    if done:
        first = [median_rank(run), *(link.rank for link in critical_chain(run)), slow[-1]]
    return list(dict.fromkeys([*first, *behind, *slow]))


def _panel(panel: picture.Panel) -> Json:
    queues = [asdict(queue) for queue in panel.queues]
    return {**_plain(panel), "bars": [_filled(bar) for bar in panel.bars], "queues": queues}


def _plain(one: picture.Panel | picture.Bar | report.Row) -> Json:
    """The fields as they are: `asdict` copies every one of ten thousand steps."""
    return {each.name: getattr(one, each.name) for each in fields(one)}


def _filled(one: picture.Bar | report.Row) -> Json:
    """Without what is empty: of ten thousand steps most have neither wait nor note."""
    kept = _plain(one).items()
    return {key: value for key, value in kept if value or (value == 0 and value is not False)}


def _graph(run: Run) -> Json | None:
    graph = run.graph
    if graph is None:
        return None
    drawn = len(graph) <= DRAWN_STEPS
    lines = _lines(graph) if drawn else set()
    steps = {step["name"]: step for step in json.loads(graph.to_json())["steps"]}
    return {
        "drawn": drawn,
        "steps": [steps[name] for name in graph.order()],
        "edges": [[e.before, e.after, e.kind, e.resource, (e.before, e.after) in lines] for e in graph.edges],
    }


def _lines(graph: Graph) -> set[tuple[str, str]]:
    """The edges that no others imply: with a step that all others need, a drawing of every edge can't be read."""
    import networkx as nx

    return set(nx.transitive_reduction(graph.to_networkx()).edges)


def _collectives(data: Json) -> Json:
    """The findings with a few of their meetings each, as many as `--why` prints: a start-up may have thousands."""
    for finding in data.get("findings", ()):
        kinds: dict[Any, Json] = {}
        for met in finding["meetings"]:
            few = {key: met[key] for key in ("op", "group", "sequence", "call_site", "callers", "step", "bytes")}
            key = met["op"], tuple(met["callers"]), met["call_site"], tuple(met["ranks"])
            kinds.setdefault(key, {**few, "ranks": ranks_in_short(met["ranks"])})
        finding["meetings"] = list(kinds.values())[:_MEETINGS]
        finding["more_meetings"] = max(0, len(kinds) - _MEETINGS)
    return data


def _left_out(run: Run) -> list[str]:
    said = []
    if len(run.headers) > 1:
        said.append("what was compiled and imported on ranks other than the one named: --rank N of these commands")
    said += [
        "steps inside of steps, and each collective by itself: initopt plot --trace run.json.gz, for Perfetto",
        "what a record can't see: collectives that libraries issue in C++, as parts of the step around them only",
        "everything after the first training step",
    ]
    return said
