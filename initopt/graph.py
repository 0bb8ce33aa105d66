"""What must happen before the first batch: steps, what each needs, what each touches.

A graph holds data only, never functions, so it can be saved, compared and drawn without the trainer's code. It does not
know how long a step takes (see `record`) nor when it starts (see `overlap`).
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import networkx as nx

STAGES = (
    "device_init",
    "process_group_init",
    "preproc_creation",
    "train_module_creation",
    "init_plugins",
    "pre_train",
    "compile",
    "get_first_batch_data",
)
"""The seven stages of a trainer's initialization, in the order of Meta's effective-training-time work, and compiling.

There it is a part of whatever stage it happens in.
"""

RESOURCES = ("rng", "comms", "fork", "compile")
"""The resources that have a meaning; any other name only keeps its users apart."""

EdgeKind = Literal["value", "order", "resource"]


LANES = "main, comms, io:<name>, cuda:<number> or process:<name>"
"""The lanes there are, in words."""

_LANE = re.compile(r"main|comms|(?:io|process):[\w.-]+|cuda:[0-9]+")
_FORMAT = 1


def _hint(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'model'?)"`, or nothing where no known name is close."""
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class GraphError(ValueError):
    """A graph that can't be run. The message names the step, the place and the way out.

    `steps` are the steps it is about (a closed path for a cycle), `call_site` is `file:line` where the first of them is
    declared, empty if not known.
    """

    def __init__(self, message: str, *, steps: Sequence[str] = (), call_site: str = "") -> None:
        super().__init__(f"{call_site}: {message}" if call_site else message)
        self.steps = tuple(steps)
        self.call_site = call_site

    @classmethod
    def in_step(cls, step: Step, problem: str) -> GraphError:
        """One step is declared wrongly; `problem` goes on from its name."""
        return cls(f"{step.name!r} {problem}", steps=(step.name,), call_site=step.call_site)

    @classmethod
    def unknown_need(cls, step: Step, need: str, known: Collection[str], inputs: Collection[str]) -> GraphError:
        """A step waits for a name that is neither a step nor an input."""
        verb = "needs" if need in step.needs else "comes after"
        way_out = _hint(need, known) or f" (inputs of the run: {', '.join(inputs) or 'none'})"
        return cls.in_step(step, f"{verb} {need!r}, which no step provides{way_out}")

    @classmethod
    def unknown_step(cls, name: str, known: Collection[str]) -> GraphError:
        """A change names a step that the graph doesn't have."""
        return cls(f"no step is named {name!r}{_hint(name, known)}", steps=(name,))

    @classmethod
    def duplicate(cls, first: Step, second: Step) -> GraphError:
        """Two steps of one name."""
        where = f", first at {first.call_site}" if first.call_site else ""
        return cls.in_step(second, f"is declared twice{where}: rename one, or replace the first on purpose")

    @classmethod
    def cycle(cls, edges: Sequence[Edge], call_site: str = "") -> GraphError:
        """Steps that wait on each other; `edges` close on themselves."""
        path = [edges[0].before, *(edge.after for edge in edges)]
        waits = {"value": "needs", "order": "comes after"}
        why = ", ".join(f"{edge.after!r} {waits[edge.kind]} {edge.before!r}" for edge in edges)
        return cls(
            f"steps wait on each other: {' -> '.join(path)}\n({why}; take one of these away)",
            steps=path,
            call_site=call_site,
        )

    @classmethod
    def no_duration(cls, name: str, value: float | None, known: Collection[str]) -> GraphError:
        """A schedule needs seconds for every step."""
        if value is None:
            return cls(f"no duration for step {name!r}{_hint(name, known)}", steps=(name,))
        return cls(f"step {name!r} can't take {value!r} s: a duration is finite and not negative", steps=(name,))


class OrderError(GraphError):
    """Two steps whose order would depend on timing."""

    @classmethod
    def draws(cls, first: Step, second: Step) -> OrderError:
        """Two steps of different origin draw random numbers and nothing orders them."""
        sites = " and ".join(step.call_site for step in (first, second) if step.call_site)
        return cls(
            f"{first.name!r} and {second.name!r} both draw random numbers ('rng') and nothing orders them;\n"
            f"the weights would depend on which draws first. Add after={first.name!r} or before={first.name!r} "
            f"to {second.name!r}.",
            steps=(first.name, second.name),
            call_site=sites,
        )


@dataclass(frozen=True, slots=True)
class Collective:
    """A meeting of the ranks of one process group that a step is known to hold.

    `bytes` is the payload per rank, `call_site` is `file:line`.
    """

    op: str
    group: str = "world"
    bytes: int = 0
    call_site: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """A named piece of start-up.

    `needs` are the steps (or inputs of the run) whose values it takes, `after` are steps it only follows. `lane` is
    the thread it runs on, `uses` are the exclusive resources it touches (`rng`, `comms`, `cuda:0`; `fork` shuts out
    every other step while it runs, `compile` is for those that run torch's compiler). `timeout` is in
    seconds. `origin` says who declared it: program order is known only among the steps of one origin. `call_site` is
    `file:line` of its definition. A step that `pauses` calls `Startup.pause` now and then, so one that forks need not
    wait for its end.
    """

    name: str
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    lane: str = "main"
    uses: tuple[str, ...] = ()
    stage: str | None = None
    timeout: float | None = None
    collectives: tuple[Collective, ...] = ()
    origin: str = ""
    call_site: str = ""
    pauses: bool = False


@dataclass(frozen=True, slots=True)
class Edge:
    """`before` ends before `after` starts: for its value, for a stated order, or for the `resource` that both touch."""

    before: str
    after: str
    kind: EdgeKind
    resource: str = ""


@dataclass(frozen=True, slots=True)
class GraphDiff:
    """What changed from one graph to another. Empty (false) exactly when both have the same digest.

    `changed` maps a step to its changed fields, each with the old and the new value; `graph` does so for the name and
    the inputs. `moved` are steps that stand elsewhere in program order. Where a step is declared is no change.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: Mapping[str, Mapping[str, tuple[object, object]]]
    moved: tuple[str, ...]
    edges_added: tuple[Edge, ...]
    edges_removed: tuple[Edge, ...]
    graph: Mapping[str, tuple[object, object]]

    def __bool__(self) -> bool:
        return any((self.added, self.removed, self.changed, self.moved, self.graph))

    def __str__(self) -> str:
        lines = [f"~ graph: {_changes(self.graph)}"] if self.graph else []
        lines += [f"+ {name}" for name in self.added]
        lines += [f"- {name}" for name in self.removed]
        lines += [f"~ {name}: {_changes(values)}" for name, values in self.changed.items()]
        lines += [f"~ {name}: moved in program order" for name in self.moved]
        lines += [
            f"{sign} {edge.before} -> {edge.after} ({edge.resource or edge.kind})"
            for sign, edges in (("+", self.edges_added), ("-", self.edges_removed))
            for edge in edges
        ]
        return "\n".join(lines) or "no difference"


class Graph(Mapping[str, Step]):
    """The steps of a start-up, checked when built, never changed afterwards. Iterates in program order.

    `steps` come in program order, that of the stock trainer. `inputs` are names that the caller of the run provides: a
    need of that name is met from the start. Raises GraphError for a graph that can't be run and OrderError for one
    whose weights would depend on timing.

    Steps that touch one resource are chained: those that draw (`rng`) or meet (`comms`) in program order as far as
    values and stated orders allow it, whatever steps stand between them; users of any other resource as `order()` has
    them. A pair of steps has one edge; it tells the strongest reason: a value, else a stated order, else a resource.
    """

    __slots__ = ("_inputs", "_name", "_order", "_predecessors", "_steps", "_successors")

    def __init__(self, steps: Iterable[Step], *, name: str = "startup", inputs: Iterable[str] = ()) -> None:
        self._name = name
        self._inputs = tuple(dict.fromkeys(inputs))
        self._steps: dict[str, Step] = {}
        for step in steps:
            if step.name in self._steps:
                raise GraphError.duplicate(self._steps[step.name], step)
            _check_step(step)
            if step.name in self._inputs:
                raise GraphError.in_step(step, "is both a step and an input of the run: rename one")
            self._steps[step.name] = step
        weaver = _Weaver(tuple(self._steps.values()), self._inputs)
        names = tuple(self._steps)
        self._order = tuple(names[i] for i in weaver.order)
        self._predecessors = {names[i]: tuple(edges.values()) for i, edges in enumerate(weaver.edges)}
        self._successors: dict[str, list[Edge]] = {each: [] for each in names}
        for each in self._order:
            for edge in self._predecessors[each]:
                self._successors[edge.before].append(edge)

    def __getitem__(self, name: str) -> Step:
        return self._steps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"<Graph {self._name!r}: {len(self)} steps on {len(self.lanes())} lanes>"

    def _key(self) -> tuple[object, ...]:
        return self._name, self._inputs, tuple(self._steps.values())

    @property
    def name(self) -> str:
        """The job whose start-up this is."""
        return self._name

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names that the caller of the run provides."""
        return self._inputs

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Every edge, by the place of its later step in `order()`."""
        return tuple(edge for step in self._order for edge in self._predecessors[step])

    def order(self) -> tuple[str, ...]:
        """The steps in the order of a serial run: a function of the graph alone, hence equal on every rank."""
        return self._order

    def lanes(self) -> dict[str, tuple[str, ...]]:
        """The steps of each lane, in `order()`."""
        lanes: dict[str, list[str]] = {}
        for step in self._order:
            lanes.setdefault(self._steps[step].lane, []).append(step)
        return {lane: tuple(steps) for lane, steps in lanes.items()}

    def predecessors(self, name: str) -> tuple[Edge, ...]:
        """The edges that end at this step. Raises KeyError for an unknown step."""
        return self._predecessors[name]

    def successors(self, name: str) -> tuple[Edge, ...]:
        """The edges that begin at this step. Raises KeyError for an unknown step."""
        return tuple(self._successors[name])

    def longest_chain(self, seconds: Mapping[str, float]) -> tuple[str, ...]:
        """The steps that decide the length of start-up if no lane is ever busy. `seconds` must name every step."""
        took = durations(self, seconds)
        ends: dict[str, float] = {}
        came_from: dict[str, str] = {}
        for step in self._order:
            latest = 0.0
            for edge in self._predecessors[step]:
                if step not in came_from or ends[edge.before] > latest:
                    latest, came_from[step] = ends[edge.before], edge.before
            ends[step] = latest + took[step]
        if not ends:
            return ()
        chain = [max(self._order, key=ends.__getitem__)]
        while chain[-1] in came_from:
            chain.append(came_from[chain[-1]])
        return tuple(reversed(chain))

    def slack(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """By how many seconds each step may grow before the longest chain does. `seconds` must name every step."""
        took = durations(self, seconds)
        ends: dict[str, float] = {}
        for step in self._order:
            ends[step] = took[step] + max((ends[edge.before] for edge in self._predecessors[step]), default=0.0)
        total = max(ends.values(), default=0.0)
        latest: dict[str, float] = {}
        for step in reversed(self._order):
            follows = self._successors[step]
            latest[step] = min((latest[edge.after] - took[edge.after] for edge in follows), default=total)
        rounding = total * 1e-12
        slack = {step: latest[step] - ends[step] for step in self._order}
        return {step: value if value > rounding else 0.0 for step, value in slack.items()}

    def lower_bound(
        self, seconds: Mapping[str, float], *, cpu_seconds: Mapping[str, float] | None = None, cores: int | None = None
    ) -> float:
        """The seconds that no schedule of this graph can beat: the longest chain, or the CPU work over the cores.

        `cpu_seconds` are CPU seconds per step (a step left out counts as none) and go with `cores`.
        """
        took = durations(self, seconds)
        chain = sum(took[step] for step in self.longest_chain(seconds))
        if cpu_seconds is None and cores is None:
            return chain
        if cpu_seconds is None or cores is None or cores < 1:
            raise ValueError(f"cpu_seconds and cores (at least 1) go together; cores is {cores!r}")
        return max(chain, sum(cpu_seconds.get(step, 0.0) for step in self._order) / cores)

    def without(self, name: str) -> Graph:
        """The graph less one step. Its dependants come after what it came after, so all others keep their order.

        A dependant loses the value that it took from the step. Raises GraphError for an unknown step.
        """
        if name not in self._steps:
            raise GraphError.unknown_step(name, self._steps)
        behind = {edge.after: edge for edge in self._successors[name]}
        # in the order of a serial run, so that no chain of a resource is drawn another way than before
        rest = [self._steps[each] for each in self._order if each != name]
        steps = [self._closing_up(name, step, behind[step.name]) if step.name in behind else step for step in rest]
        return Graph(steps, name=self._name, inputs=self._inputs)

    def _closing_up(self, gone: str, step: Step, link: Edge) -> Step:
        """A dependant of the step that goes: it comes after all that came before that one."""
        # a chain of one resource closes by itself
        ahead = [e.before for e in self._predecessors[gone] if not (link.resource and e.resource == link.resource)]
        needs = tuple(need for need in step.needs if need != gone)
        after = dict.fromkeys(name for name in (*step.after, *ahead) if name != gone and name not in needs)
        return replace(step, needs=needs, after=tuple(after))

    def replacing(self, step: Step) -> Graph:
        """The graph with the step of this name exchanged, at its place. Raises GraphError for an unknown step."""
        if step.name not in self._steps:
            raise GraphError.unknown_step(step.name, self._steps)
        return Graph((self._steps | {step.name: step}).values(), name=self._name, inputs=self._inputs)

    def adding(self, step: Step) -> Graph:
        """The graph with one step more, the last in program order."""
        return Graph((*self._steps.values(), step), name=self._name, inputs=self._inputs)

    def digest(self) -> str:
        """SHA-256 (hex) of what must happen, equal on ranks that agree. Where steps are declared is left out."""
        return hashlib.sha256(json.dumps(self._plain(places=False), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """JSON text with one step on each line; `from_json` reads it back."""
        plain = self._plain(places=True)
        steps = ",\n ".join(json.dumps(step) for step in plain.pop("steps"))
        return f'{json.dumps(plain)[:-1]}, "steps": [\n {steps}\n]}}\n'

    @classmethod
    def from_json(cls, text: str | bytes) -> Graph:
        """Read and check what `to_json` wrote. Raises GraphError naming what is wrong."""
        import msgspec

        try:
            saved = msgspec.json.decode(text, type=_Saved)
        except msgspec.MsgspecError as error:
            raise GraphError(f"not a graph saved by initopt: {error}") from error
        if saved.version != _FORMAT:
            raise GraphError(f"the graph is saved in format {saved.version}; this initopt reads format {_FORMAT}")
        return cls(saved.steps, name=saved.name, inputs=saved.inputs)

    def _plain(self, *, places: bool) -> dict[str, Any]:
        steps = [_plain_step(step, places=places) for step in self._steps.values()]
        return {"version": _FORMAT, "name": self._name, "inputs": list(self._inputs), "steps": steps}

    def to_networkx(self) -> nx.DiGraph[str]:
        """The graph for networkx: nodes carry `step` (a Step) and `lane`, edges carry `kind` and `resource`."""
        import networkx as nx

        graph: nx.DiGraph[str] = nx.DiGraph(name=self._name)
        for step in self._order:
            graph.add_node(step, step=self._steps[step], lane=self._steps[step].lane)
        graph.add_edges_from((e.before, e.after, {"kind": e.kind, "resource": e.resource}) for e in self.edges)
        return graph

    def _drawn_edges(self) -> list[Edge]:
        """Every value, and those orders that no other path implies: a picture of all edges can't be read."""
        import networkx as nx

        kept = nx.transitive_reduction(self.to_networkx())
        return [edge for edge in self.edges if edge.kind == "value" or kept.has_edge(edge.before, edge.after)]

    def to_mermaid(self) -> str:
        """Mermaid text, one box for each lane: values as solid arrows, orders dashed, resources dashed and named."""
        ids = {step: f"s{i}" for i, step in enumerate(self._order)}
        lines = ["flowchart LR"]
        for i, (lane, steps) in enumerate(self.lanes().items()):
            lines += [f"  subgraph lane{i}[{_mermaid_text(lane)}]"]
            lines += [f"    {ids[step]}[{_mermaid_text(step)}]" for step in steps]
            lines += ["  end"]
        for edge in self._drawn_edges():
            arrow = "-->" if edge.kind == "value" else "-.->"
            label = f"|{_mermaid_text(edge.resource)}|" if edge.resource else ""
            lines.append(f"  {ids[edge.before]} {arrow}{label} {ids[edge.after]}")
        return "\n".join(lines) + "\n"

    def to_dot(self) -> str:
        """Graphviz text, one box for each lane: values as solid arrows, orders dashed, resources dashed and named."""
        lines = [f"digraph {_dot_text(self._name)} {{", "  rankdir=LR; node [shape=box];"]
        for i, (lane, steps) in enumerate(self.lanes().items()):
            lines += [f"  subgraph cluster_{i} {{", f"    label={_dot_text(lane)};"]
            lines += [f"    {_dot_text(step)};" for step in steps]
            lines += ["  }"]
        for edge in self._drawn_edges():
            style = "" if edge.kind == "value" else " [style=dashed]"
            if edge.resource:
                style = f" [style=dashed, label={_dot_text(edge.resource)}]"
            lines.append(f"  {_dot_text(edge.before)} -> {_dot_text(edge.after)}{style};")
        return "\n".join([*lines, "}"]) + "\n"

    def diff(self, other: Graph) -> GraphDiff:
        """What it takes to get from this graph to `other`."""
        changed: dict[str, dict[str, tuple[object, object]]] = {}
        for name, step in self.items():
            if name in other:
                old, new = _plain_step(step, places=False), _plain_step(other[name], places=False)
                keys = [f.name for f in fields(Step) if old.get(f.name) != new.get(f.name)]
                if keys:
                    changed[name] = {key: (getattr(step, key), getattr(other[name], key)) for key in keys}
        whole = {"name": (self.name, other.name), "inputs": (self.inputs, other.inputs)}
        mine, theirs = set(self.edges), set(other.edges)
        return GraphDiff(
            added=tuple(name for name in other if name not in self),
            removed=tuple(name for name in self if name not in other),
            changed=changed,
            moved=_moved(self, other),
            edges_added=tuple(edge for edge in other.edges if edge not in mine),
            edges_removed=tuple(edge for edge in self.edges if edge not in theirs),
            graph={key: pair for key, pair in whole.items() if pair[0] != pair[1]},
        )


def durations(graph: Graph, seconds: Mapping[str, float]) -> dict[str, float]:
    """The seconds of every step of the graph, checked. Raises GraphError for a missing, negative or endless one."""
    took: dict[str, float] = {}
    for step in graph.order():
        value = seconds.get(step)
        if value is None or not 0 <= value < math.inf:
            raise GraphError.no_duration(step, value, seconds)
        took[step] = value
    return took


@dataclass(frozen=True, slots=True)
class _Saved:
    version: int
    name: str
    inputs: tuple[str, ...]
    steps: tuple[Step, ...]


def _check_step(step: Step) -> None:
    """What is wrong with a step whatever the others are."""
    if not step.name:
        raise GraphError.in_step(step, "is no name for a step: give it one")
    for field in ("needs", "after", "uses"):
        if isinstance(getattr(step, field), str):
            raise GraphError.in_step(step, f"has a string as {field}, not a tuple: write ({getattr(step, field)!r},)")
    if not _LANE.fullmatch(step.lane):
        raise GraphError.in_step(step, f"is on {step.lane!r}, which is no lane: use {LANES}")
    if step.stage is not None and step.stage not in STAGES:
        way_out = _hint(step.stage, STAGES) or f": use one of {', '.join(STAGES)}"
        raise GraphError.in_step(step, f"has the unknown stage {step.stage!r}{way_out}")
    for resource in step.uses:
        # Any name may be a resource, so only what looks like a slip of the pen is one.
        near = _hint(resource, [known for known in RESOURCES if abs(len(known) - len(resource)) < 2])
        if near and resource not in RESOURCES:
            raise GraphError.in_step(step, f"uses {resource!r}{near}")
    number = isinstance(step.timeout, (int, float))
    if step.timeout is not None and not (number and 0 < step.timeout < math.inf):
        raise GraphError.in_step(
            step, f"has timeout {step.timeout!r} s: give a positive number, or None for no limit of its own"
        )
    resources = [resource for resource in ("rng", "fork") if resource in step.uses]
    if step.pauses and resources:
        raise GraphError.in_step(
            step, f"pauses and uses {resources[0]!r}, which it would hold meanwhile. Drop pauses=True"
        )
    if step.lane != "comms" and (step.collectives or "comms" in step.uses):
        why = "holds collectives" if step.collectives else "uses 'comms'"
        raise GraphError.in_step(
            step, f"{why} but is on lane {step.lane!r}: ranks could meet in different orders. Set lane='comms'"
        )


def _touched(step: Step) -> set[str]:
    return {*step.uses, "comms"} if step.lane == "comms" else set(step.uses)


class _Weaver:
    """Finds the edges and the order of steps known by their place in program order."""

    def __init__(self, steps: Sequence[Step], inputs: Collection[str]) -> None:
        self.steps = steps
        self.edges: list[dict[int, Edge]] = []
        self.follows: list[list[int]] = [[] for _ in steps]
        self._state(inputs)
        self.order = self._sorted()
        if len(self.order) < len(steps):
            raise self._cycle()
        self._place()
        users: dict[str, list[int]] = {}
        for i, step in enumerate(steps):
            for resource in sorted(_touched(step)):
                users.setdefault(resource, []).append(i)
        # draws first: their order decides the weights, so no other resource may bend it
        self._chain_draws(users.pop("rng", []))
        self._chain(self._in_program_order(users.pop("comms", [])), "comms")
        for resource in sorted(users):
            self._chain(sorted(users[resource], key=self.place.__getitem__), resource)

    def _state(self, inputs: Collection[str]) -> None:
        """The edges that the steps themselves state."""
        index = {step.name: i for i, step in enumerate(self.steps)}
        for i, step in enumerate(self.steps):
            before: dict[int, Edge] = {}
            kinds: tuple[tuple[EdgeKind, tuple[str, ...]], ...] = (("value", step.needs), ("order", step.after))
            for kind, names in kinds:
                for name in names:
                    j = index.get(name)
                    if j is None:
                        if name not in inputs:
                            raise GraphError.unknown_need(step, name, {*index, *inputs}, inputs)
                    elif j not in before:
                        before[j] = Edge(name, step.name, kind)
                        self.follows[j].append(i)
            self.edges.append(before)

    def _sorted(self) -> list[int]:
        """Topological order, the earliest ready step in program order first; incomplete if there is a cycle."""
        if all(i < j for i, follows in enumerate(self.follows) for j in follows):
            return list(range(len(self.steps)))
        waits = self._waits()
        ready = [i for i, count in enumerate(waits) if not count]
        order = []
        while ready:
            i = heapq.heappop(ready)
            order.append(i)
            for j in self.follows[i]:
                waits[j] -= 1
                if not waits[j]:
                    heapq.heappush(ready, j)
        return order

    def _waits(self) -> list[int]:
        waits = [0] * len(self.steps)
        for follows in self.follows:
            for j in follows:
                waits[j] += 1
        return waits

    def _place(self) -> None:
        self.place = [0] * len(self.steps)
        for place, i in enumerate(self.order):
            self.place[i] = place

    def _cycle(self) -> GraphError:
        """A shortest cycle through the first step in program order that is on one."""
        import networkx as nx

        graph: nx.DiGraph[int] = nx.DiGraph((j, i) for i, before in enumerate(self.edges) for j in before)
        loops = (part for part in nx.strongly_connected_components(graph) if _loops(graph, part))
        part = min(loops, key=min)
        start = min(part)
        tails = nx.single_source_shortest_path(graph.subgraph(part), start)
        path = min((tails[j] for j in self.edges[start] if j in tails), key=lambda path: (len(path), path))
        closed = [*path, start]
        edges = [self.edges[after][before] for before, after in pairwise(closed)]
        return GraphError.cycle(edges, self.steps[start].call_site)

    def _users_in_order(self, users: Collection[int]) -> tuple[list[int], tuple[int, int] | None]:
        """These steps in program order as far as the edges allow; and the first two that no path orders, if any."""
        waits = self._waits()
        wanted = set(users)
        ready = [i for i in sorted(wanted) if not waits[i]]
        others = [i for i, count in enumerate(waits) if not count and i not in wanted]
        order: list[int] = []
        undecided: tuple[int, int] | None = None
        while others or ready:
            # all other steps run first: a user that is not ready then has another user before it
            if others:
                i = others.pop()
            else:
                i = heapq.heappop(ready)
                order.append(i)
                if ready and undecided is None:
                    undecided = i, ready[0]
            for j in self.follows[i]:
                waits[j] -= 1
                if not waits[j]:
                    if j in wanted:
                        heapq.heappush(ready, j)
                    else:
                        others.append(j)
        return order, undecided

    def _in_program_order(self, users: Sequence[int]) -> Sequence[int]:
        """Users in program order as far as edges allow; searches the graph only where the two disagree."""
        if all(self.place[i] < self.place[j] for i, j in pairwise(users)):
            return users
        return self._users_in_order(users)[0]

    def _follow(self, users: Sequence[int]) -> None:
        """Hold users to this order from now on."""
        for i, j in pairwise(users):
            self.follows[i].append(j)
        if any(self.place[i] > self.place[j] for i, j in pairwise(users)):
            self.order = self._sorted()
            self._place()

    def _chain(self, users: Sequence[int], resource: str) -> None:
        self._follow(users)
        for i, j in pairwise(users):
            if i not in self.edges[j]:
                self.edges[j][i] = Edge(self.steps[i].name, self.steps[j].name, "resource", resource)

    def _chain_draws(self, users: Sequence[int]) -> None:
        origins: dict[str, list[int]] = {}
        for i in users:
            origins.setdefault(self.steps[i].origin, []).append(i)
        if len(origins) > 1:
            for own in origins.values():
                self._follow(self._in_program_order(own))
            users, undecided = self._users_in_order(users)
            if undecided:
                raise OrderError.draws(*(self.steps[i] for i in undecided))
        self._chain(self._in_program_order(users) if len(origins) == 1 else users, "rng")


def _loops(graph: nx.DiGraph[int], part: Collection[int]) -> bool:
    return len(part) > 1 or any(graph.has_edge(i, i) for i in part)


def _plain_step(step: Step, *, places: bool) -> dict[str, Any]:
    """The fields that differ from their defaults, as JSON values; call sites only with `places`."""
    plain = _plain_fields(step, _STEP_DEFAULTS, places)
    if step.collectives:
        plain["collectives"] = [_plain_fields(meeting, _COLLECTIVE_DEFAULTS, places) for meeting in step.collectives]
    return plain


def _plain_fields(item: Step | Collective, defaults: Mapping[str, Any], places: bool) -> dict[str, Any]:
    values: dict[str, Any] = {key: getattr(item, key) for key in defaults if places or key != "call_site"}
    if values.get("timeout") is not None:
        values["timeout"] = float(values["timeout"])  # so that 60 and 60.0 are the same in the digest
    return {key: value for key, value in values.items() if value != defaults[key]}


# a field without default differs from MISSING, so it is always kept
_STEP_DEFAULTS = {field.name: field.default for field in fields(Step)}
_COLLECTIVE_DEFAULTS = {field.name: field.default for field in fields(Collective)}


def _changes(values: Mapping[str, tuple[object, object]]) -> str:
    return ", ".join(f"{key} {_words(old)} -> {_words(new)}" for key, (old, new) in values.items())


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_words(item) for item in value)})"
    if isinstance(value, Collective):
        return f"{value.op}@{value.group}" + (f" {value.bytes} bytes" if value.bytes else "")
    return "none" if value in (None, "") else str(value)


def _moved(old: Graph, new: Graph) -> tuple[str, ...]:
    """The fewest steps whose moving turns the one program order into the other."""
    places = {name: i for i, name in enumerate(new)}
    shared = [name for name in old if name in places]
    ends: list[int] = []
    lengths = []
    for name in shared:
        length = bisect_left(ends, places[name])
        ends[length : length + 1] = [places[name]]
        lengths.append(length)
    stays: set[str] = set()
    wanted = len(ends) - 1
    for name, length in zip(reversed(shared), reversed(lengths), strict=True):
        if length == wanted:
            stays.add(name)
            wanted -= 1
    return tuple(name for name in shared if name not in stays)


def _mermaid_text(text: str) -> str:
    escaped = text.translate({ord(character): f"#{ord(character)};" for character in '#"<>&'})
    return f'"{escaped}"'


def _dot_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
