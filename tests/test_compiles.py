"""What was compiled, in every view: inside its step, and without changing what the start-up was made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from initopt import picture, report, trace
from initopt.chain import critical_chain, split
from initopt.compiles import Sharing, cache_use, compiled_in, compiled_on, sharing, total
from initopt.record import Cached, CompileCache, Compiled, Recorder, Span
from initopt.runs import Run
from tests.synthetic import compiled_spans, overlapped_spans, write_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    spans, compiles = compiled_spans()
    return Run.load(write_run(tmp_path, spans, mode="overlap", compiles=compiles))


def test_a_turn_of_the_compiler_changes_no_part_of_the_start_up(run: Run, tmp_path: Path) -> None:
    bare = Run.load(write_run(tmp_path / "bare", overlapped_spans(), mode="overlap"))
    assert any(span.kind == "compile" for span in run.spans)
    for rank in range(3):
        assert split(run, rank) == split(bare, rank)
        assert run.first_batch(rank) == bare.first_batch(rank)
    assert critical_chain(run) == critical_chain(bare)


def test_without_a_graph_either(tmp_path: Path) -> None:
    spans, compiles = compiled_spans()
    run = Run.load(write_run(tmp_path, spans, graph=None, compiles=compiles))
    bare = Run.load(write_run(tmp_path / "bare", overlapped_spans(), graph=None))
    assert [split(run, rank) for rank in range(3)] == [split(bare, rank) for rank in range(3)]


def test_the_turns_of_a_rank_are_counted(run: Run) -> None:
    first = total(compiled_on(run, 0))
    assert (first.graphs, first.from_cache, first.recompiled, first.breaks, first.failed) == (3, 0, 0, 1, 0)
    assert first.took == pytest.approx(3.8)
    assert first.dynamo + first.aot_autograd + first.backend == pytest.approx(3.8)
    last = total(compiled_on(run, 2))
    assert (last.graphs, last.from_cache, last.recompiled, last.breaks, last.failed) == (4, 3, 1, 0, 1)


def test_the_times_are_on_the_axis_of_the_run(tmp_path: Path) -> None:
    from tests.test_runs import header, write

    turn = Compiled("f", "a.py:1", 2.0, 3.0, rank=1)
    for rank in range(2):
        span = Span("f", 2.0, 3.0, kind="compile", stage="compile")
        more = [{"kind": "compiled", **{name: getattr(turn, name) for name in ("name", "place", "start", "end")}}]
        write(tmp_path / "0001", header(rank, start=1000.0 + 5 * rank), [span], *more)
    loaded = Run.load(tmp_path / "0001")
    assert [(one.rank, one.start, one.end) for one in loaded.compiled] == [(0, 2.0, 3.0), (1, 7.0, 8.0)]
    assert [(span.rank, span.start) for span in loaded.spans] == [(0, 2.0), (1, 7.0)]


@pytest.mark.parametrize(
    ("lane", "step", "found"),
    [
        ("main", "inner", "outer"),  # in a step inside the step
        ("a thread", "outer", "outer"),
        ("a thread", "", "late"),  # autograd's own thread: whatever began last
        ("a thread", "unknown", None),
    ],
)
def test_a_turn_belongs_to_the_step_that_it_happened_in(
    lane: str, step: str, found: str | None, tmp_path: Path
) -> None:
    spans = [Span("outer", 0, 9), Span("inner", 1, 8, step="outer"), Span("late", 2, 7, lane="comms")]
    spans.append(Span("f", 3, 4, lane=lane, step=step, kind="compile"))
    run = Run.load(write_run(tmp_path, [spans], graph=None))
    assert [name for name, _ in compiled_in(run, 0)] == [found] * (found is not None)


@pytest.mark.parametrize(
    ("aot_autograd", "fx_graph", "used"),
    [
        ("hit", "hit", "hit"),
        ("miss", "hit", "part"),
        ("miss", "miss", "miss"),
        ("hit", "miss", "miss"),
        ("bypass", "hit", "bypass"),
        ("bypass", "miss", "miss"),
        ("", "hit", "hit"),
        ("", "", ""),
    ],
)
def test_the_two_caches_in_one_word(aot_autograd: Cached, fx_graph: Cached, used: str) -> None:
    one = Compiled("f", "a.py:1", 0, 1, aot_autograd_cache=aot_autograd, fx_graph_cache=fx_graph)
    assert cache_use(one) == used


def test_who_led_and_who_waited(run: Run) -> None:
    assert sharing(run) == Sharing((0,), (1, 2), (), 2.5)
    assert sharing(replace(run, compile_caches=())) is None


def test_what_a_rank_says_last_of_the_cache_counts(tmp_path: Path) -> None:
    with Recorder("j", mode="stock", root=tmp_path) as recorder:
        recorder.agree(0, 1)
        recorder.compile_cache(CompileCache("follower", leader=1, waited=9.0, why="rank 1 is late"))
        recorder.compile_cache(CompileCache("leader", leader=0, files=3, bytes=4096, why="rank 1 is late"))
    run = Run.load(tmp_path / "0001")
    late = "rank 1 is late"
    assert run.compile_caches == (
        CompileCache("follower", 1, 9.0, why=late),
        CompileCache("leader", 0, files=3, bytes=4096, why=late),
    )
    assert sharing(run) == Sharing((0,), (), (), 0.0)


def test_blame_and_the_chain_know_the_part_that_compiled(run: Run) -> None:
    rows = {row["step"]: row for row in report.blame(run, 2).data["steps"]}
    assert rows["first_step"]["compiling"] == pytest.approx(0.25)
    assert rows["compile"]["compiling"] == pytest.approx(0.8)
    assert rows["model"]["compiling"] == 0
    chain = {link["step"]: link["compiling"] for link in report.chain_view(run, 2).data["chain"]}
    assert chain["first_step"] == pytest.approx(0.25)


def test_the_picture_marks_what_was_compiled(run: Run) -> None:
    recorded, planned = picture.panels(run, 2)
    bars = {bar.name: bar for bar in recorded.bars}
    assert sorted(bars) == sorted({span.name for span in run.of_rank(2) if span.kind in ("import", "step")})
    assert len(bars["compile"].compiles) == 3 and len(bars["first_step"].compiles) == 2
    for bar in recorded.bars:
        assert all(bar.start <= start < end <= bar.end for start, end in bar.compiles)
    assert "250ms compiling" in bars["first_step"].about
    assert not any(bar.compiles for bar in planned.bars)
    assert b"compile</" not in picture.draw(replace(run, spans=tuple(s for s in run.spans if s.kind != "compile")), 2)
    assert picture.draw(run, 2) == picture.draw(run, 2)


def test_the_trace_has_a_slice_with_the_stages(run: Run) -> None:
    slices = [event for event in trace.chrome_trace(run)["traceEvents"] if event.get("cat") == "compile"]
    assert len(slices) == 11
    late = next(event for event in slices if "recompile_reason" in event["args"])
    assert (late["name"], late["args"]["stage"]) == ("Over.forward", "compile")
    assert late["args"]["backend"] == pytest.approx(0.14)


def test_a_run_in_which_nothing_was_compiled_says_so(tmp_path: Path) -> None:
    run = Run.load(write_run(tmp_path, overlapped_spans()))
    view = report.compile_view(run)
    assert not view.finding and "torch's compiler did nothing on rank" in view.plain
    assert report.summary(run).data["compile"] is None
    assert "compile" not in report.summary(run).plain
