"""Work, wait and queue of start-ups whose parts are known by construction, and chains that cross ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from initopt.chain import (
    UNNAMED,
    critical_chain,
    finished_ranks,
    median_rank,
    rank_chain,
    slowest_rank,
    split,
    steps_of,
)
from initopt.graph import Graph, Step
from initopt.record import Span
from initopt.runs import RecordError, Run
from tests.synthetic import overlapped_spans, serial_spans, write_run


def run_of(tmp_path: Path, spans: Sequence[Sequence[Span]], graph: Graph | None = None) -> Run:
    return Run.load(write_run(tmp_path, spans, graph=graph))


@pytest.fixture
def serial(tmp_path: Path) -> Run:
    return Run.load(write_run(tmp_path, serial_spans()))


@pytest.fixture
def overlapped(tmp_path: Path) -> Run:
    return Run.load(write_run(tmp_path, overlapped_spans(), mode="overlap"))


@pytest.fixture
def stock(tmp_path: Path) -> Run:
    return Run.load(write_run(tmp_path, serial_spans(), mode="stock", graph=None))


def test_the_parts_are_those_of_the_steps(serial: Run) -> None:
    parts = split(serial, 1)
    # imports 3.2, model 2, plan 0.1, broadcast 0.06 of 2.86, shard 2.52 of 2.62, optimizer 0.2, first step 0.5
    assert parts.work == pytest.approx(3.2 + 2.0 + 0.1 + 0.06 + 2.52 + 0.2 + 0.5)
    # plan.broadcast until rank 0 has planned (0.2 s behind it after the reader), shard until rank 2 has come
    assert parts.wait == pytest.approx((3.0 - 0.1 - 0.2) + 0.1)
    # process group (0.6 + 1.3 wait + 0.02) and reader before the model, compile before the optimizer
    assert parts.queue == pytest.approx((0.6 + 1.3 + 0.02) + 5.2 + 4.0)


@pytest.mark.parametrize("kind", ["serial", "overlapped", "stock"])
def test_the_parts_add_up_to_the_time_to_first_batch(kind: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(kind)
    for rank in run.headers:
        parts = split(run, rank)
        assert parts.total == pytest.approx(run.first_batch(rank), abs=1e-9)
        assert min(parts.work, parts.wait, parts.queue) >= 0


def test_the_chain_goes_on_at_the_rank_that_came_last(serial: Run) -> None:
    chain = [(link.step, link.rank, link.waited_for) for link in critical_chain(serial)]
    assert chain == [
        ("first_step", 0, None),
        ("optimizer", 0, None),
        ("shard", 0, 2),
        ("shard", 2, None),
        ("plan.broadcast", 2, 0),
        ("plan.broadcast", 0, None),
        ("plan", 0, None),
        ("process_group", 0, 2),
        ("process_group", 2, None),
        ("imports", 2, None),
    ]


def test_the_chain_says_what_it_stood_behind(serial: Run) -> None:
    queued = {link.step: link for link in critical_chain(serial) if link.queue > 0.01}
    assert queued["optimizer"].behind == ("compile",)
    assert queued["optimizer"].queue == pytest.approx(4.0)
    assert queued["plan"].behind == ("reader", "model")


@pytest.mark.parametrize("kind", ["serial", "overlapped", "stock"])
def test_the_chain_is_without_holes_across_ranks(kind: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(kind)
    links = critical_chain(run)
    covered = sum(link.start + link.took - link.joined + link.queue for link in links)
    assert covered == pytest.approx(run.first_batch(slowest_rank(run)), abs=1e-9)
    for later, earlier in pairwise(links):
        assert earlier.start + earlier.took == pytest.approx(later.joined - later.queue, abs=1e-9)


def test_without_a_graph_the_steps_are_one_sequence(stock: Run) -> None:
    links = rank_chain(stock.of_rank(0), None)
    assert [link.step for link in links] == [
        "first_step",
        "optimizer",
        "compile",
        "shard",
        "plan.broadcast",
        "plan",
        "model",
        "reader",
        "process_group",
        "imports",
    ]
    assert split(stock, 0).queue == 0


def test_without_a_graph_unrecorded_time_is_work(tmp_path: Path) -> None:
    run = run_of(tmp_path, [[Span("imports", 0, 1, kind="import"), Span("model", 3, 4), Span("first_step", 4, 5)]])
    assert [(link.step, link.took) for link in critical_chain(run)][2] == (UNNAMED, 2)
    assert split(run, 0).work == 5


def test_without_a_graph_a_step_stands_behind_those_of_other_threads(tmp_path: Path) -> None:
    spans = [Span("imports", 0, 1, kind="import"), Span("read", 1, 4, lane="io:data"), Span("first_step", 4, 5)]
    spans.append(Span("model", 3, 4.5, lane="other"))
    run = run_of(tmp_path, [spans])
    assert split(run, 0).queue == 0
    late = [Span("imports", 0, 1, kind="import"), Span("read", 1, 4, lane="io:data"), Span("first_step", 2, 5)]
    (tmp_path / "late").mkdir()
    links = critical_chain(run_of(tmp_path / "late", [late]))
    assert [(link.step, link.queue, link.behind) for link in links] == [
        ("first_step", 1, ("read",)),
        ("imports", 0, ()),
    ]


def test_a_step_inside_a_step_is_not_on_the_chain_by_itself(tmp_path: Path) -> None:
    spans = [Span("shard", 0, 4), Span("tables", 1, 3, step="shard"), Span("first_step", 4, 5)]
    run = run_of(tmp_path, [spans])
    assert [span.name for span in steps_of(run, 0)] == ["shard", "first_step"]
    assert [link.step for link in critical_chain(run)] == ["first_step", "shard"]


def test_the_meeting_of_an_inner_step_belongs_to_the_outer_one(tmp_path: Path) -> None:
    def of_rank(came: float) -> list[Span]:
        meeting = Span("barrier", came, 4, kind="collective", step="tables", op="barrier", group="world", sequence=0)
        return [Span("shard", 0, 4.5), Span("tables", 0, 4.2, step="shard"), meeting, Span("first_step", 4.5, 5)]

    run = run_of(tmp_path, [of_rank(1.0), of_rank(3.9)])
    assert [(link.step, link.rank, link.waited_for) for link in critical_chain(run)] == [
        ("first_step", 0, None),
        ("shard", 0, 1),
        ("shard", 1, None),
    ]


def test_ranks_that_come_together_do_not_cross(tmp_path: Path) -> None:
    def of_rank(came: float) -> list[Span]:
        meeting = Span("barrier", came, 2, kind="collective", step="shard", op="barrier", group="w", sequence=0)
        return [Span("shard", 0, 2), meeting, Span("first_step", 2, 3)]

    run = run_of(tmp_path, [of_rank(1.0), of_rank(1.004)])
    assert {link.rank for link in critical_chain(run)} == {0}


def test_a_step_stands_behind_the_holder_of_its_resource(tmp_path: Path) -> None:
    graph = Graph(
        [
            Step("tables", lane="io:a", uses=("rng",)),
            Step("noise", lane="io:b"),
            Step("model", uses=("rng",)),
            Step("first_step", needs=("model",)),
        ]
    )
    spans = [
        Span("imports", 0, 1, kind="import"),
        Span("tables", 1, 3, lane="io:a"),
        Span("noise", 1, 3, lane="io:b"),
        Span("model", 3, 4),
        Span("first_step", 4, 5),
    ]
    model = critical_chain(run_of(tmp_path, [spans], graph))[1]
    assert (model.step, model.queue, model.behind) == ("model", 2, ("tables",))


def test_steps_outside_the_graph_keep_their_place(tmp_path: Path) -> None:
    graph = Graph([Step("model"), Step("reader", lane="io:data")])
    spans = [
        Span("imports", 0, 1, kind="import"),
        Span("arguments", 1, 1.5),
        Span("model", 2, 4),
        Span("reader", 2, 6, lane="io:data"),
        Span("first_step", 6, 7),
    ]
    links = critical_chain(run_of(tmp_path, [spans], graph))
    assert [(link.step, link.queue) for link in links] == [
        ("first_step", 0),
        ("reader", 0.5),
        ("arguments", 0),
        ("imports", 0),
    ]


def test_of_two_needs_the_one_with_the_longer_chain_is_followed(tmp_path: Path) -> None:
    graph = Graph([Step("model"), Step("log"), Step("first_step", needs=("model", "log"))])
    spans = [
        Span("imports", 0, 1, kind="import"),
        Span("model", 1, 5),
        Span("log", 5, 6),
        Span("first_step", 6, 7),
    ]
    links = critical_chain(run_of(tmp_path, [spans], graph))
    assert [(link.step, link.queue, link.behind) for link in links] == [
        ("first_step", 1, ("log",)),
        ("model", 0, ()),
        ("imports", 0, ()),
    ]


def test_median_and_slowest_rank(overlapped: Run) -> None:
    times = [overlapped.first_batch(rank) for rank in range(3)]
    assert median_rank(overlapped) == sorted(range(3), key=times.__getitem__)[1]
    assert slowest_rank(overlapped) == max(range(3), key=times.__getitem__)


def test_a_run_without_a_first_batch_has_no_chain(tmp_path: Path) -> None:
    run = run_of(tmp_path, [[Span("model", 0, 1, error="OSError"), Span("first_step", 1, 2, error="OSError")]])
    assert finished_ranks(run) == []
    with pytest.raises(RecordError, match="no rank finished the step 'first_step'"):
        critical_chain(run)
    with pytest.raises(RecordError):
        split(run, 0)
