"""The chain of any schedule accounts for all of its time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from initopt.chain import rank_chain
from initopt.graph import Graph, Step
from initopt.record import Span
from initopt.simulate import simulate


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Graph, list[Span]]:
    count = draw(st.integers(1, 12))
    steps = []
    for number in range(count):
        before = [f"s{earlier}" for earlier in range(number)]
        needs = tuple(draw(st.lists(st.sampled_from(before), unique=True, max_size=3))) if before else ()
        lane = draw(st.sampled_from(["main", "io:data", "process:compile"]))
        steps.append(Step(f"s{number}", needs=needs, lane=lane))
    steps.append(Step("first_step", needs=tuple(step.name for step in steps)))
    graph = Graph(steps)
    took = {name: draw(st.integers(1, 50)) / 10 for name in graph}
    return graph, simulate(graph, took, serial=draw(st.booleans()))


@given(schedules())
def test_every_second_is_work_or_queue(schedule: tuple[Graph, list[Span]]) -> None:
    graph, spans = schedule
    links = rank_chain(spans, graph)
    end = max(span.end for span in spans)
    assert sum(link.took + link.queue for link in links) == pytest.approx(end)
    clock = end
    for link in links:
        assert link.start + link.took == pytest.approx(clock)
        clock = link.start - link.queue
    assert clock == pytest.approx(0, abs=1e-9)


@given(schedules())
def test_each_link_needs_the_one_before(schedule: tuple[Graph, list[Span]]) -> None:
    graph, spans = schedule
    links = rank_chain(spans, graph)
    for later, earlier in pairwise(links):
        assert earlier.step in {edge.before for edge in graph.predecessors(later.step)}


@given(schedules())
def test_without_a_graph_a_serial_schedule_is_all_work(schedule: tuple[Graph, list[Span]]) -> None:
    graph, spans = schedule
    serial = simulate(graph, {span.name: span.end - span.start for span in spans}, serial=True)
    assert sum(link.queue for link in rank_chain(serial, None)) == 0


@given(schedules())
def test_the_work_is_the_longest_chain_of_the_graph(schedule: tuple[Graph, list[Span]]) -> None:
    graph, spans = schedule
    took = {span.name: span.end - span.start for span in spans}
    longest = sum(took[name] for name in graph.longest_chain(took))
    assert sum(link.took for link in rank_chain(spans, graph)) == pytest.approx(longest)
