"""What stood before the first batch though the first batch did not need it: found, never moved.

Three kinds of proof, none of them a name. In a graph, a step from which no value and no stated order leads to the first
training step. A data loader from which nobody took a batch, a process group that carried no collective: both watched
(see `unused`). The packages of a line of which no code ran after it (see `imports`). What each saves is simulated. A
step's other effects (files, globals, what it changes in a value it takes) can't be seen, so a finding says what
has to hold.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from initopt.chain import finished_ranks, steps_of
from initopt.planned import per_step, saving, work
from initopt.record import FIRST_STEP

if TYPE_CHECKING:
    import networkx as nx

    from initopt.graph import Graph, Step
    from initopt.imports import ImportLine
    from initopt.record import Span
    from initopt.runs import Run
    from initopt.unused import Unused

Kind = Literal["step", "loader", "group", "import"]

_WORTH = 0.01
"""Seconds that a finding must take on one rank to be one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that could come after the first batch. `place` is its `file:line`, `took` the seconds on the slowest.

    `saves` are simulated seconds, None where the time of its own is not known. It holds if each of `provided` does.
    `kept` are the packages that the line of an import was also the first to import, and that are needed.
    """

    kind: Kind
    what: str
    place: str
    took: float
    saves: float | None
    provided: tuple[str, ...]
    step: str = ""
    kept: tuple[str, ...] = ()

    @property
    def worth_saying(self) -> bool:
        """Whether to speak of it where it was not asked for: not of a loader that mostly has cost nothing by then."""
        return self.kind != "loader" or self.saves is not None


Less = dict[int, dict[str, float]]
"""Seconds that each step of each rank takes less."""


def findings(run: Run) -> tuple[Finding, ...]:
    """What could be deferred, the largest saving first. Empty for a start-up that never reached its first batch."""
    found = [finding for finding, _ in _found(run)]
    return tuple(sorted(found, key=lambda one: (-(one.saves or 0.0), one.place)))


def together(run: Run) -> float | None:
    """Seconds that all findings with a known saving save together, simulated at once. None where no saving is known."""
    found = _found(run)
    if found and all(finding.saves is None for finding, _ in found):
        return None
    whole: Less = {rank: {} for rank in finished_ranks(run)}
    for finding, less in found:
        for rank, steps in less.items():
            for step, value in steps.items() if finding.saves is not None else ():
                # No step gives more than it has: `planned` sees to it.
                whole[rank][step] = whole[rank].get(step, 0.0) + value
    return saving(run, whole) if whole else 0.0


def _found(run: Run) -> list[tuple[Finding, Less]]:
    if not finished_ranks(run):
        return []
    return [*_steps(run), *_objects(run), *_imports(run)]


def not_needed(graph: Graph) -> tuple[str, ...]:
    """The steps before `first_step` that it needs neither for a value nor by an order that somebody stated.

    Whoever declared `first_step` needs all other steps of its own, a plugin its own ones. That it follows those of
    another origin states nothing: it follows them all. Empty without such a step.
    """
    if FIRST_STEP not in graph:
        return ()
    import networkx as nx

    origin, needs = graph[FIRST_STEP].origin, _needs(graph)
    roots = {FIRST_STEP} | {name for name in graph if origin and graph[name].origin == origin}
    needed = roots.union(nx.descendants(needs, FIRST_STEP), *(nx.ancestors(needs, root) for root in roots))
    return tuple(name for name in graph.order() if name not in needed)


def _needs(graph: Graph) -> nx.DiGraph[str]:
    """From each step to those that need it."""
    import networkx as nx

    needs: nx.DiGraph[str] = nx.DiGraph()
    needs.add_nodes_from(graph)
    for edge in graph.edges:
        origins = {graph[edge.before].origin, graph[edge.after].origin}
        follows_all = edge.after == FIRST_STEP and edge.kind == "order" and len(origins) > 1
        if edge.kind != "resource" and not follows_all:
            needs.add_edge(edge.before, edge.after)
    return needs


def _steps(run: Run) -> list[tuple[Finding, Less]]:
    graph = run.graph
    if graph is None:
        return []
    import networkx as nx

    idle, needs = not_needed(graph), _needs(graph)
    took = {rank: per_step(run, rank, waits=False) for rank in finished_ranks(run)}
    found = []
    for name in idle:
        longest = max(times[name] for times in took.values())
        if longest < _WORTH:
            continue
        # What needs it goes with it.
        moved = nx.descendants(needs, name) | {name}
        less = {rank: {step: times[step] for step in moved} for rank, times in took.items()}
        step = graph[name]
        provided = _provided(graph, step, idle)
        found.append((Finding("step", name, step.call_site, longest, saving(run, less), provided, name), less))
    return found


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


def _objects(run: Run) -> list[tuple[Finding, Less]]:
    # A step that is not needed is found as a whole.
    whole = () if run.graph is None else not_needed(run.graph)
    seen: defaultdict[tuple[Literal["loader", "group"], str, str, bool], list[Unused]] = defaultdict(list)
    for one in run.unused:
        # A line may make several, and what an iterator took is known only of those that have one.
        seen[one.what, one.call_site, one.step, one.begun].append(one)
    found = []
    for (what, place, step, _), made in seen.items():
        ranks = {one.rank for one in made}
        idle = {(one.rank, one.group) for one in made}
        # Ranks run the same lines: what only some of them left unused is needed.
        everywhere = _made_groups(run, place) <= idle if what == "group" else ranks == set(finished_ranks(run))
        if step in whole or not everywhere:
            continue
        less: Less = {rank: {} for rank in finished_ranks(run)}
        provided: tuple[str, ...] = ()
        if what == "group":
            for rank, group in ((rank, group) for rank, group in idle if rank in less):
                calls = (c for c in run.of_rank(rank) if c.group == group and c.op in _MAKES_GROUP)
                less[rank][step] = less[rank].get(step, 0.0) + sum(c.end - c.start - c.wait for c in calls)
        else:
            if step and all(one.alone for one in made) and _may_go(run, step):
                for rank in ranks:
                    less[rank][step] = sum(work(span) for span in steps_of(run, rank) if span.name == step)
                provided += (_ITS_STEP,) if any(less[rank][step] for rank in ranks) else ()
            for one in made:
                begun = _begun(run, one)
                # What is part of its step is counted there.
                if begun is not None and not (begun.name == step and step in less[one.rank]):
                    less[one.rank][begun.name] = less[one.rank].get(begun.name, 0.0) + min(
                        one.end - one.start, work(begun)
                    )
        took = max((sum(steps.values()) for steps in less.values()), default=0.0)
        known = took > 0.0 and (what == "loader" or bool(step))
        if known and took < _WORTH:
            continue
        saves = saving(run, less) if known else None
        provided += _PROVIDED[what] if known else ()
        if any(one.begun for one in made):
            provided += (_GENERATOR,)
        shown = step or next((name for steps in less.values() for name in steps), "")
        found.append((Finding(what, _WHAT[what], place, took, saves, provided, shown), less))
    return found


def _begun(run: Run, one: Unused) -> Span | None:
    """The step in which the iterator of a loader was made, None where that is not known."""
    if not one.begun or one.end <= one.start:
        return None
    middle = (one.start + one.end) / 2
    around = [span for span in steps_of(run, one.rank) if span.start <= middle <= span.end]
    # On other lanes there may be others at the same time.
    return min(around, key=lambda span: (span.name != one.begun_in, span.end - span.start), default=None)


def _may_go(run: Run, step: str) -> bool:
    """Whether nothing is known of a step that the first batch needs: no value, no meeting."""
    meets = any(span.kind == "collective" and span.step == step for span in run.spans)
    return not meets and (run.graph is None or step not in run.graph)


def _made_groups(run: Run, place: str) -> set[tuple[int, str]]:
    """The rank and the name of each group that was made at `place`, on its members."""
    calls = (span for span in run.spans if span.op in _MAKES_GROUP and span.call_site == place and span.group)
    return {(call.rank, call.group) for call in calls}


_MAKES_GROUP = ("new_group", "split_group")
_WHAT = {"loader": "data loader, no batch taken", "group": "process group, no collective"}
_ITS_STEP = "its step does nothing else that the first batch needs"
_GENERATOR = (
    "it has a random generator of its own, as by DataLoader(..., generator=torch.Generator().manual_seed(seed)): an "
    "iterator without one draws from torch's default generator when it is made, so elsewhere the draws that now come "
    "after it (weights, dropout, shuffling) would be others. To add a generator changes them once"
)
_PROVIDED = {
    "loader": ("nothing asks it for its length or batches before",),
    "group": ("every rank makes its groups later, all in one order",),
}


def _imports(run: Run) -> list[tuple[Finding, Less]]:
    ranks = finished_ranks(run)
    by_line: defaultdict[str, list[ImportLine]] = defaultdict(list)
    for one in run.import_lines:
        if one.own:
            by_line[one.line].append(one)
    found = []
    for line, rows in by_line.items():
        kept = tuple(dict.fromkeys(name for one in rows for name in one.kept))
        left = [{name for one in rows if one.rank == rank for name, _ in one.unneeded} for rank in ranks]
        # Ranks run the same lines: what only some of them left unused is needed.
        idle = set.intersection(*left).difference(kept)
        less: Less = {rank: {} for rank in ranks}
        each: defaultdict[str, float] = defaultdict(float)
        for one in rows:
            for name, value in one.unneeded if one.rank in less else ():
                if name in idle:
                    less[one.rank][one.step] = less[one.rank].get(one.step, 0.0) + value
                    each[name] = max(each[name], value)
        took = max(sum(steps.values()) for steps in less.values())
        if took < _WORTH:
            continue
        names = sorted(each, key=lambda name: -each[name])
        what = f"import {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        step = next(iter(less[min(less)]))
        # Between the named steps of a script: how much of that time it was is not known.
        saves = None if any("" in steps for steps in less.values()) else saving(run, less)
        found.append((Finding("import", what, line, took, saves, _IMPORT_PROVIDED, step, kept), less))
    return found


_IMPORT_PROVIDED = (
    "nothing of it is used before in a way that was not seen: by loader workers or code in C, as a constant or a base "
    "class, or through what its import registers or replaces",
)
