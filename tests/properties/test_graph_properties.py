"""What holds for every graph: its order, its draws and meetings, its changes, its schedule."""

from __future__ import annotations

import itertools
import random
from typing import Any

import networkx as nx
from hypothesis import assume, given
from hypothesis import strategies as st

from initopt.graph import STAGES, Collective, Graph, OrderError, Step
from initopt.record import Span
from initopt.simulate import simulate

LANES = ("main", "comms", "io:a", "io:b", "cuda:0", "process:p")
RESOURCES = ("rng", "fork", "cuda:0", "disk")
USES = ((), *((resource,) for resource in RESOURCES), ("rng", "cuda:0"), ("disk", "rng"), ("fork", "disk"))


@st.composite
def step_lists(draw: st.DrawFn, origins: tuple[str, ...] = ("",)) -> list[Step]:
    """Steps without a cycle, in any program order."""
    steps: list[Step] = []
    for i in range(draw(st.integers(1, 9))):
        near = range(max(0, i - 4), i)
        # one draw for all waits, two bits each: many small draws make hypothesis slow
        waits = draw(st.integers(0, 4 ** len(near) - 1))
        kinds = {f"s{j}": waits >> 2 * k & 3 for k, j in enumerate(near)}
        lane = draw(st.sampled_from(LANES))
        steps.append(
            Step(
                f"s{i}",
                needs=tuple(name for name, kind in kinds.items() if kind == 1),
                after=tuple(name for name, kind in kinds.items() if kind == 2),
                lane=lane,
                uses=draw(st.sampled_from(USES)),
                stage=(None, *STAGES)[i % 8],
                timeout=(None, 1, 2.5)[i % 3],
                collectives=(Collective("barrier", bytes=i),) if lane == "comms" and i % 2 else (),
                origin=draw(st.sampled_from(origins)) if len(origins) > 1 else "",
                call_site=f"train.py:{i}",
            )
        )
    return draw(st.permutations(steps))


graphs = step_lists().map(Graph)


@st.composite
def timed(draw: st.DrawFn) -> tuple[Graph, dict[str, float]]:
    """A graph and seconds that add up without rounding."""
    graph = draw(graphs)
    return graph, {name: draw(st.integers(0, 40)) / 4 for name in graph}


def happens_before(graph: Graph) -> set[tuple[str, str]]:
    return set(nx.transitive_closure(graph.to_networkx()).edges)


def stated(steps: list[Step]) -> nx.DiGraph[str]:
    """The values and orders that the steps state, found without the code under test."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(step.name for step in steps)
    graph.add_edges_from((name, step.name) for step in steps for name in (*step.needs, *step.after))
    return graph


def users(graph: Graph, resource: str) -> list[str]:
    held = (n for n in graph.order() if resource in graph[n].uses or (resource, graph[n].lane) == ("comms", "comms"))
    return list(held)


@given(step_lists())
def test_the_order_is_the_first_in_program_order_that_respects_every_edge(steps: list[Step]) -> None:
    graph = Graph(steps)
    place = {step.name: i for i, step in enumerate(steps)}
    assert list(graph.order()) == list(nx.lexicographical_topological_sort(graph.to_networkx(), key=place.__getitem__))


@given(step_lists())
def test_every_stated_wait_is_an_edge(steps: list[Step]) -> None:
    assert {(e.before, e.after) for e in Graph(steps).edges if not e.resource} == set(stated(steps).edges)


@given(graphs)
def test_users_of_one_resource_never_overlap(graph: Graph) -> None:
    ordered = happens_before(graph)
    for resource in ("comms", *RESOURCES):
        assert set(itertools.pairwise(users(graph, resource))) <= ordered


@given(step_lists())
def test_draws_leave_program_order_only_where_a_path_forces_them(steps: list[Step]) -> None:
    paths = nx.transitive_closure(stated(steps))
    drawing = [step.name for step in steps if "rng" in step.uses]
    expected = []
    while drawing:
        expected.append(next(n for n in drawing if not any(paths.has_edge(m, n) for m in drawing)))
        drawing.remove(expected[-1])
    assert users(Graph(steps), "rng") == expected


@given(step_lists(), st.randoms(use_true_random=False))
def test_meetings_do_not_depend_on_where_other_steps_stand(steps: list[Step], chance: random.Random) -> None:
    """Without draws; these come first, and may order meetings too."""
    steps = [Step(s.name, s.needs, s.after, s.lane) for s in steps]
    meeting = [step for step in steps if step.lane == "comms"]
    shuffled = chance.sample(steps, len(steps))
    in_turn = iter(meeting)
    mixed = [next(in_turn) if step.lane == "comms" else step for step in shuffled]
    assert Graph(mixed).lanes().get("comms") == Graph(steps).lanes().get("comms")


@given(step_lists(origins=("p", "q", "r")))
def test_draws_of_several_origins_are_accepted_exactly_when_paths_order_them(steps: list[Step]) -> None:
    known = stated(steps)
    for origin in ("p", "q", "r"):
        own = [step for step in steps if step.origin == origin and "rng" in step.uses]
        paths = nx.transitive_closure(known)
        while own:
            first = next(s for s in own if not any(paths.has_edge(other.name, s.name) for other in own))
            own.remove(first)
            known.add_edges_from((first.name, other.name) for other in own)
    paths = nx.transitive_closure(known)
    drawing = [step.name for step in steps if "rng" in step.uses]
    pairs = [p for p in itertools.combinations(drawing, 2) if not (paths.has_edge(*p) or paths.has_edge(*p[::-1]))]
    try:
        graph = Graph(steps)
    except OrderError as error:
        assert error.steps in pairs or error.steps[::-1] in pairs
    else:
        assert not pairs
        assert set(itertools.pairwise(users(graph, "rng"))) <= set(paths.edges)


@given(st.data())
def test_a_removal_keeps_the_happens_before_and_the_order_of_the_rest(data: st.DataObject) -> None:
    steps = data.draw(step_lists(origins=("p", "q")))
    graph = accepted(steps)
    gone = data.draw(st.sampled_from(steps)).name
    smaller = graph.without(gone)
    assert smaller.order() == tuple(name for name in graph.order() if name != gone)
    assert happens_before(smaller) == {pair for pair in happens_before(graph) if gone not in pair}


def accepted(steps: list[Step]) -> Graph:
    try:
        return Graph(steps)
    except OrderError:
        assume(False)
        raise


@given(graphs)
def test_a_graph_survives_json_and_has_the_same_digest(graph: Graph) -> None:
    copy = Graph.from_json(graph.to_json())
    assert copy == graph
    assert copy.edges == graph.edges
    assert copy.digest() == graph.digest()


@given(step_lists(), step_lists(), st.booleans())
def test_graphs_differ_exactly_when_their_digests_do(old: list[Step], new: list[Step], same_steps: bool) -> None:
    one, other = Graph(old), Graph(sorted(old, key=lambda step: step.name) if same_steps else new)
    assert bool(one.diff(other)) == (one.digest() != other.digest())
    assert not one.diff(Graph(old))


@given(graphs)
def test_a_drawing_implies_every_edge(graph: Graph) -> None:
    ids = {f"s{i}": name for i, name in enumerate(graph.order())}
    lines = [line.split() for line in graph.to_mermaid().splitlines() if "->" in line]
    drawn: nx.DiGraph[Any] = nx.DiGraph((ids[line[0]], ids[line[-1]]) for line in lines)
    drawn.add_nodes_from(graph)
    assert set(nx.transitive_closure(drawn).edges) == happens_before(graph)


@given(timed())
def test_a_schedule_respects_needs_lanes_and_forks(case: tuple[Graph, dict[str, float]]) -> None:
    graph, seconds = case
    spans = {span.name: span for span in simulate(graph, seconds)}
    assert {name: span.end - span.start for name, span in spans.items()} == seconds
    assert all(spans[edge.before].end <= spans[edge.after].start for edge in graph.edges)
    for one, other in itertools.combinations(spans.values(), 2):
        if one.lane == other.lane or "fork" in (*graph[one.name].uses, *graph[other.name].uses):
            assert not overlap(one, other)
    starts = [span.name for span in simulate(graph, seconds) if span.lane == "comms"]
    assert tuple(starts) == graph.lanes().get("comms", ())


def overlap(one: Span, other: Span) -> bool:
    return max(one.start, other.start) < min(one.end, other.end)


@given(timed(), st.integers(1, 4))
def test_a_schedule_lies_between_the_lower_bound_and_serial(case: tuple[Graph, dict[str, float]], cores: int) -> None:
    graph, seconds = case
    serial = max(span.end for span in simulate(graph, seconds, serial=True))
    assert serial == sum(seconds.values())
    assert graph.lower_bound(seconds) <= max(span.end for span in simulate(graph, seconds)) <= serial
    spans = simulate(graph, seconds, cores=cores)
    assert graph.lower_bound(seconds, cpu_seconds=seconds, cores=cores) <= max(span.end for span in spans) <= serial
    for instant in {span.start for span in spans}:
        assert sum(span.start <= instant < span.end for span in spans) <= cores


@given(timed())
def test_slack_is_how_much_a_step_may_grow(case: tuple[Graph, dict[str, float]]) -> None:
    graph, seconds = case
    bound = graph.lower_bound(seconds)
    assert sum(seconds[name] for name in graph.longest_chain(seconds)) == bound
    assert set(itertools.pairwise(graph.longest_chain(seconds))) <= {(e.before, e.after) for e in graph.edges}
    for name, slack in graph.slack(seconds).items():
        assert graph.lower_bound({**seconds, name: seconds[name] + slack}) == bound
        assert graph.lower_bound({**seconds, name: seconds[name] + slack + 1}) == bound + 1
