"""What stood before the first batch though the first batch did not need it: found, never moved.

Three kinds of proof, none of them a name. In a graph, a step from which no value and no stated order leads to the first
training step. A data loader that nobody iterated, a process group that carried no collective: both watched (see
`unused`). A line whose imports no code of theirs followed (see `imports`). What each saves is simulated. A step's other
effects (files, globals, what it changes in a value it takes) can't be seen, so a finding says what has to hold.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from initopt.chain import finished_ranks, steps_of
from initopt.planned import per_step, saving
from initopt.record import FIRST_STEP

if TYPE_CHECKING:
    from initopt.graph import Graph, Step
    from initopt.runs import Run

Kind = Literal["step", "loader", "group", "import"]

_WORTH = 0.01
"""Seconds that a finding must take on one rank to be one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that could come after the first batch. `place` is its `file:line`, `took` the seconds on the slowest.

    `saves` are simulated seconds, None where the time of its own is not known. It holds if each of `provided` does.
    """

    kind: Kind
    what: str
    place: str
    took: float
    saves: float | None
    provided: tuple[str, ...]
    step: str = ""


def findings(run: Run) -> tuple[Finding, ...]:
    """What could be deferred, the largest saving first. Empty for a start-up that never reached its first batch."""
    if not finished_ranks(run):
        return ()
    steps = _steps(run)
    named = {finding.what for finding in steps}
    found = [*steps, *_objects(run, named), *_imports(run)]
    return tuple(sorted(found, key=lambda one: (-(one.saves or 0.0), one.place)))


def not_needed(graph: Graph) -> tuple[str, ...]:
    """The steps before `first_step` that it needs neither for a value nor by an order that somebody stated.

    Whoever declared `first_step` needs all other steps of its own, a plugin its own ones. That it follows those of
    another origin states nothing: it follows them all. Empty without such a step.
    """
    if FIRST_STEP not in graph:
        return ()
    import networkx as nx

    origin = graph[FIRST_STEP].origin
    needs: nx.DiGraph[str] = nx.DiGraph()
    needs.add_nodes_from(graph)
    for edge in graph.edges:
        follows_all = edge.after == FIRST_STEP and edge.kind == "order" and graph[edge.before].origin != origin
        if edge.kind != "resource" and not follows_all:
            needs.add_edge(edge.before, edge.after)
    roots = {FIRST_STEP} | {name for name in graph if origin and graph[name].origin == origin}
    needed = roots.union(nx.descendants(needs, FIRST_STEP), *(nx.ancestors(needs, root) for root in roots))
    return tuple(name for name in graph.order() if name not in needed)


def _steps(run: Run) -> list[Finding]:
    graph = run.graph
    if graph is None:
        return []
    idle = not_needed(graph)
    found = []
    for name in idle:
        # What needs it goes with it.
        moved = [other for other in idle if other == name or _comes_after(graph, name, other)]
        took = {rank: per_step(run, rank, waits=False) for rank in finished_ranks(run)}
        longest = max(times[name] for times in took.values())
        if longest < _WORTH:
            continue
        saves = saving(run, {rank: {step: times[step] for step in moved} for rank, times in took.items()})
        step = graph[name]
        found.append(Finding("step", name, step.call_site, longest, saves, _provided(graph, step, idle), name))
    return found


def _comes_after(graph: Graph, name: str, other: str) -> bool:
    seen, left = set(), [name]
    while left:
        for edge in graph.successors(left.pop()):
            if edge.kind != "resource" and edge.after not in seen:
                seen.add(edge.after)
                left.append(edge.after)
    return other in seen


def _provided(graph: Graph, step: Step, idle: tuple[str, ...]) -> tuple[str, ...]:
    provided = []
    shared = [need for need in step.needs if need in graph and need not in idle]
    if shared:
        provided.append(f"it changes nothing in {', '.join(shared)}")
    if "rng" in step.uses:
        provided.append("it gets a random generator of its own: it draws, and what follows would draw other numbers")
    if step.lane == "comms":
        provided.append("it moves on every rank: it may meet the others")
    return tuple(provided)


def _objects(run: Run, named: set[str]) -> list[Finding]:
    seen: defaultdict[tuple[Literal["loader", "group"], str, str], list[tuple[int, str, bool]]] = defaultdict(list)
    for one in run.unused:
        seen[one.what, one.call_site, one.step].append((one.rank, one.group, one.alone))
    found = []
    for (what, place, step), made in seen.items():
        ranks = {rank for rank, _, _ in made}
        idle = {(rank, group) for rank, group, _ in made}
        # Ranks run the same lines: what only some of them left unused is needed.
        everywhere = _made_groups(run, place) <= idle if what == "group" else ranks == set(finished_ranks(run))
        if step in named or not everywhere:
            continue
        less: dict[int, float] = {}
        for rank in ranks:
            if what == "group":
                names = {group for other, group, _ in made if other == rank}
                calls = (c for c in run.of_rank(rank) if c.group in names and c.op in _MAKES_GROUP)
                less[rank] = sum(call.end - call.start - call.wait for call in calls)
            elif all(alone for _, _, alone in made):
                less[rank] = sum(s.end - s.start - s.wait for s in steps_of(run, rank) if s.name == step)
        took = max(less.values(), default=0.0)
        less |= {rank: 0.0 for rank in finished_ranks(run) if rank not in less} if less else {}
        known = bool(less) and bool(step)
        if known and took < _WORTH:
            continue
        saves = saving(run, {rank: {step: taken} for rank, taken in less.items()}) if known else None
        found.append(Finding(what, _WHAT[what], place, took, saves, _PROVIDED[what] if known else (), step))
    return found


def _made_groups(run: Run, place: str) -> set[tuple[int, str]]:
    """The rank and the name of each group that was made at `place`, on its members."""
    calls = (span for span in run.spans if span.op in _MAKES_GROUP and span.call_site == place and span.group)
    return {(call.rank, call.group) for call in calls}


_MAKES_GROUP = ("new_group", "split_group")
_WHAT = {"loader": "data loader, not iterated", "group": "process group, no collective"}
_PROVIDED = {
    "loader": ("its step does nothing else that the first batch needs",),
    "group": ("every rank makes its groups later, all in one order",),
}


def _imports(run: Run) -> list[Finding]:
    by_line: defaultdict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    packages: dict[str, list[str]] = {}
    kept: set[str] = set()
    for one in run.import_lines:
        if one.needed != "no":
            kept.add(one.line)
            continue
        steps = by_line[one.line].setdefault(one.rank, {})
        steps[one.step] = steps.get(one.step, 0.0) + one.seconds
        packages.setdefault(one.line, [name for name, _ in one.packages])
    found = []
    for line, of_rank in by_line.items():
        took = max(sum(steps.values()) for steps in of_rank.values())
        if line in kept or took < _WORTH or set(of_rank) != set(finished_ranks(run)):
            continue
        saves = saving(run, of_rank)
        what = f"import {', '.join(packages[line][:3])}{', ...' if len(packages[line]) > 3 else ''}"
        found.append(Finding("import", what, line, took, saves, _IMPORT_PROVIDED, next(iter(of_rank[min(of_rank)]))))
    return found


_IMPORT_PROVIDED = ("the line's names are not read before: constants and base classes are not seen in use",)


def together(run: Run, found: tuple[Finding, ...]) -> float:
    """Seconds that all findings with a known saving save together, simulated at once."""
    ranks = finished_ranks(run)
    less: dict[int, dict[str, float]] = {rank: {} for rank in ranks}
    for finding in found:
        if finding.saves is not None:
            for rank in ranks:
                # No step gives more than it has: `planned` sees to it.
                less[rank][finding.step] = less[rank].get(finding.step, 0.0) + finding.took
    return saving(run, less)
