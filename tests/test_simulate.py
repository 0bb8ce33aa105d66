"""A simulated start-up follows the rules by which the lanes run a real one."""

from __future__ import annotations

import pytest

from initopt.graph import Graph, GraphError, Step
from initopt.record import Span
from initopt.simulate import simulate


def times(spans: list[Span]) -> dict[str, tuple[float, float]]:
    return {span.name: (span.start, span.end) for span in spans}


def test_lanes_overlap_and_steps_wait_for_what_they_need() -> None:
    graph = Graph([Step("reader", lane="io:data"), Step("model"), Step("first", needs=("reader", "model"))])
    spans = simulate(graph, {"reader": 3.0, "model": 2.0, "first": 1.0})
    assert times(spans) == {"reader": (0.0, 3.0), "model": (0.0, 2.0), "first": (3.0, 4.0)}


def test_serial_is_one_after_the_other_in_order() -> None:
    graph = Graph([Step("b", needs=("a",)), Step("a", lane="io:data")])
    assert times(simulate(graph, {"a": 3.0, "b": 2.0}, serial=True)) == {"a": (0.0, 3.0), "b": (3.0, 5.0)}


def test_spans_carry_lane_stage_and_place() -> None:
    graph = Graph([Step("a", lane="io:x", stage="pre_train", call_site="a.py:1")])
    assert simulate(graph, {"a": 1.0}) == [Span("a", 0.0, 1.0, lane="io:x", stage="pre_train", call_site="a.py:1")]


def test_a_lane_takes_the_earliest_of_its_ready_steps() -> None:
    graph = Graph([Step("gate", lane="io:x"), Step("long"), Step("late", needs=("gate",)), Step("last")])
    spans = simulate(graph, {"gate": 1.0, "long": 2.0, "late": 1.0, "last": 1.0})
    assert times(spans)["late"] == (2.0, 3.0)
    assert times(spans)["last"] == (3.0, 4.0)


def test_a_lane_does_not_idle_for_an_earlier_step_that_is_not_ready() -> None:
    graph = Graph([Step("gate", lane="io:x"), Step("waits", needs=("gate",)), Step("free")])
    assert times(simulate(graph, {"gate": 2.0, "waits": 1.0, "free": 1.0}))["free"] == (0.0, 1.0)


def test_meetings_keep_their_order_although_a_later_one_is_ready() -> None:
    graph = Graph([Step("slow"), Step("first", needs=("slow",), lane="comms"), Step("second", lane="comms")])
    spans = simulate(graph, {"slow": 5.0, "first": 1.0, "second": 1.0})
    assert times(spans)["second"] == (6.0, 7.0)


def test_a_step_that_forks_runs_alone_and_holds_back_what_is_ready() -> None:
    graph = Graph(
        [Step("long", lane="io:x"), Step("short"), Step("loader", needs=("short",), uses=("fork",)), Step("next")]
    )
    spans = simulate(graph, {"long": 4.0, "short": 1.0, "loader": 2.0, "next": 1.0})
    assert times(spans)["loader"] == (4.0, 6.0)
    assert times(spans)["next"] == (6.0, 7.0)


def test_a_step_that_pauses_makes_way_for_one_that_forks() -> None:
    steps = [Step("long", lane="io:x", pauses=True), Step("short"), Step("loader", needs=("short",), uses=("fork",))]
    steps.append(Step("next", lane="io:x"))
    seconds = {"long": 4.0, "short": 1.0, "loader": 2.0, "next": 1.0}
    assert times(simulate(Graph(steps), seconds)) == {
        "long": (0.0, 6.0),
        "short": (0.0, 1.0),
        "loader": (1.0, 3.0),
        "next": (6.0, 7.0),
    }


def test_two_steps_that_fork_run_one_after_the_other() -> None:
    graph = Graph([Step("a", lane="io:a", uses=("fork",)), Step("b", lane="io:b", uses=("fork",)), Step("c")])
    assert times(simulate(graph, dict.fromkeys("abc", 1.0))) == {"a": (0.0, 1.0), "b": (1.0, 2.0), "c": (2.0, 3.0)}


def test_fewer_cores_than_lanes() -> None:
    graph = Graph([Step("c", lane="io:c"), Step("b", lane="io:b"), Step("a", lane="io:a")])
    spans = simulate(graph, dict.fromkeys("abc", 1.0), cores=2)
    assert times(spans) == {"c": (0.0, 1.0), "b": (0.0, 1.0), "a": (1.0, 2.0)}


def test_steps_that_take_no_time_end() -> None:
    graph = Graph([Step("a"), Step("b", needs=("a",), uses=("fork",)), Step("c", needs=("b",))])
    assert times(simulate(graph, dict.fromkeys("abc", 0.0))) == dict.fromkeys("abc", (0.0, 0.0))


def test_nothing_takes_no_time() -> None:
    assert simulate(Graph([]), {}) == []


def test_what_cannot_be_simulated_is_refused() -> None:
    graph = Graph([Step("a")])
    with pytest.raises(GraphError, match="no duration for step 'a'"):
        simulate(graph, {})
    with pytest.raises(ValueError, match="cores must be at least 1, not 0"):
        simulate(graph, {"a": 1.0}, cores=0)
