"""The views as they are printed at 80 columns, and the data behind them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from initopt import bench, report
from initopt.planned import planned
from initopt.record import Span, Watched
from initopt.runs import RecordError, Run
from tests.golden import check_golden
from tests.synthetic import BORN, GRAPH, compiled_spans, overlapped_spans, serial_spans, wasteful, write_run

LABEL = "emulated: reader first batch 5 s, 20 ms per collective"

View = Callable[[Run], report.View]
VIEWS: dict[str, View] = {
    "summary": report.summary,
    "blame": report.blame,
    "chain": report.chain_view,
    "ett": report.ett_view,
}


@pytest.fixture
def serial(tmp_path: Path) -> Run:
    path = write_run(tmp_path, serial_spans(), labels=(LABEL,))
    return replace(Run.load(path), path=Path(".initopt/0007"))


@pytest.fixture
def overlapped(tmp_path: Path) -> Run:
    path = write_run(tmp_path, overlapped_spans(), number=8, mode="overlap", labels=(LABEL,))
    return replace(Run.load(path), path=Path(".initopt/0008"))


@pytest.fixture
def compiled(tmp_path: Path) -> Run:
    spans, compiles = compiled_spans()
    path = write_run(tmp_path, spans, number=10, mode="overlap", labels=(LABEL,), compiles=compiles)
    return replace(Run.load(path), path=Path(".initopt/0010"))


@pytest.fixture
def stock(tmp_path: Path) -> Run:
    path = write_run(tmp_path, serial_spans(), number=6, mode="stock", graph=None)
    return replace(Run.load(path), path=Path(".initopt/0006"))


@pytest.fixture
def wasting(tmp_path: Path) -> Run:
    spans, graph, found = wasteful()
    path = write_run(tmp_path, spans, number=11, graph=graph, labels=(LABEL,), extra=found)
    return replace(Run.load(path), path=Path(".initopt/0011"))


@pytest.fixture
def unfinished(tmp_path: Path) -> Run:
    spans = [of_rank[:-2] for of_rank in serial_spans()]
    broken = next(number for number, span in enumerate(spans[1]) if span.name == "shard")
    spans[1] = [*spans[1][:broken], replace(spans[1][broken], error="OutOfMemoryError")]
    path = write_run(tmp_path, spans, number=9, world_size=8)
    return replace(Run.load(path), path=Path(".initopt/0009"))


def sample(run: int, first_batch: float, digest: str = "a" * 64) -> bench.Sample:
    steps = {"imports": 3.0, "reader": first_batch / 2, "compile": first_batch / 4}
    work, wait = 0.7 * first_batch, 0.1 * first_batch
    digests = {"state, rank 0": digest, "state, rank 1": digest}
    queue = first_batch - work - wait
    return bench.Sample(first_batch, first_batch + 0.3, 1, work, wait, queue, steps, digests, f"{run}", f"{run}.log")


def measurement(number: int = 6, stock: float = 24.0, mine: float = 12.0, digest: str = "a" * 64) -> bench.Bench:
    sides = {
        "stock": tuple(sample(run, stock + run / 10) for run in range(4)),
        "initopt": tuple(sample(run, mine + run / 20, digest) for run in range(4)),
    }
    return bench.Bench(
        number=number,
        taken=BORN,
        stock=bench.Side("stock", ("torchrun", "stock.py"), (LABEL,), sides["stock"]),
        initopt=bench.Side("initopt", ("torchrun", "initopt.py"), (LABEL,), sides["initopt"]),
        warmup=1,
        prepare=None,
        ranks=2,
        hosts=("trn-01",),
        cores=8,
        commit="3f9c2e1d0b7a",
        versions={"python": "3.11.7", "torch": "2.13.0"},
    )


@pytest.mark.parametrize("kind", ["serial", "overlapped", "stock"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_look_as_they_did(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(kind)
    check_golden(f"{name}_{kind}.txt", VIEWS[name](run).plain + "\n")


def test_what_was_compiled_looks_as_it_did(compiled: Run) -> None:
    check_golden("summary_compiled.txt", report.summary(compiled).plain + "\n")
    check_golden("compile.txt", report.compile_view(compiled).plain + "\n")
    check_golden("compile_rank2.txt", report.compile_view(compiled, 2).plain + "\n")
    check_golden("blame_compiled.txt", report.blame(compiled, 2).plain + "\n")
    check_golden("chain_compiled.txt", report.chain_view(compiled, 2).plain + "\n")


def test_the_gain_over_a_baseline_looks_as_it_did(overlapped: Run, stock: Run) -> None:
    check_golden("ett_baseline.txt", report.ett_view(overlapped, stock).plain + "\n")


def test_a_start_up_that_stopped_looks_as_it_did(unfinished: Run) -> None:
    view = report.summary(unfinished)
    assert view.finding
    check_golden("summary_unfinished.txt", view.plain + "\n")


def test_a_wide_terminal_gets_the_notes_beside_the_bars(serial: Run) -> None:
    check_golden("blame_wide.txt", report.blame(serial, 2, width=110).plain + "\n")


def test_imports_look_as_they_did(wasting: Run) -> None:
    check_golden("blame_wasting.txt", report.blame(wasting, 1).plain + "\n")
    check_golden("imports.txt", report.imports_view(wasting).plain + "\n")
    everywhere = [replace(one, needed="") for one in wasting.imported]
    lines = [replace(one, needed="", unneeded=(), kept=()) for one in wasting.import_lines]
    unwatched = replace(wasting, imported=tuple(everywhere), import_lines=tuple(lines))
    check_golden("imports_unwatched.txt", report.imports_view(unwatched, 2).plain + "\n")


def test_what_could_be_deferred_looks_as_it_did(wasting: Run, stock: Run) -> None:
    view = report.defer_view(wasting)
    assert view.finding
    check_golden("defer.txt", view.plain + "\n")
    check_golden("summary_wasting.txt", report.summary(wasting).plain + "\n")
    nothing = report.defer_view(stock)
    assert not nothing.finding
    check_golden("defer_nothing.txt", nothing.plain + "\n")
    assert view.data["looked_at"] == ["steps", "loaders", "groups", "imports"]
    assert nothing.data["looked_at"] == [] and set(nothing.data["not_looked_at"]) == set(view.data["looked_at"])


@pytest.mark.parametrize(
    ("watched", "why"),
    [
        (Watched(), "record_imports() was not called before the recorder was made, and INITOPT_IMPORTS is not used"),
        (Watched(used=True), "record_imports() was not called before the recorder was made"),
        (Watched(imports="timed"), "INITOPT_IMPORTS=used watches them"),
        (Watched(imports="timed", used=True), "another profiler was on"),
    ],
)
def test_why_imports_were_not_looked_at(stock: Run, watched: Watched, why: str) -> None:
    run = replace(stock, watched=dict.fromkeys(stock.headers, watched))
    said = report.defer_view(run).data["not_looked_at"]["imports"]
    assert said.endswith(why)


def test_objects_of_all_ranks_must_have_been_watched(stock: Run) -> None:
    every = dict.fromkeys(stock.headers, Watched(objects=True))
    assert report.defer_view(replace(stock, watched=every)).data["looked_at"] == ["loaders", "groups"]
    without = replace(stock, watched={**every, 1: Watched()})
    assert report.defer_view(without).data["looked_at"] == []


def test_the_launcher_s_start_is_what_runs_are_compared_from(stock: Run, serial: Run) -> None:
    def launched(run: Run, seconds: float) -> Run:
        headers = {rank: replace(header, after_launcher=seconds) for rank, header in run.headers.items()}
        return replace(run, headers=headers)

    before, after = (report.ett_view(run).data["time_to_start"] for run in (stock, serial))
    both = report.ett_view(launched(serial, 0.5), launched(stock, 2.0))
    assert both.data["since"] == "launcher"
    assert both.data["baseline"]["time_to_start"] == pytest.approx(before + 2.0)
    assert both.data["time_to_start"] == pytest.approx(after + 0.5)
    one = report.ett_view(launched(serial, 0.5), stock)
    assert (one.data["since"], one.data["time_to_start"]) == ("worker", after)
    assert "after its launcher (such as torchrun) began" in report.summary(launched(stock, 2.0)).plain


def test_imports_that_were_not_recorded_are_no_view(stock: Run, unfinished: Run) -> None:
    with pytest.raises(RecordError, match=r"call initopt.record_imports\(\) before them"):
        report.imports_view(stock)
    with pytest.raises(RecordError, match="rank 0 has imported nothing since its record began"):
        report.imports_view(replace(stock, watched={0: Watched(imports="timed")}), 0)
    killed = replace(stock, trailers={})
    with pytest.raises(RecordError, match="the record of rank 0 stops before its end, where its imports would be"):
        report.imports_view(killed, 0)
    with pytest.raises(RecordError, match="no rank finished"):
        report.defer_view(unfinished)


def test_a_measurement_looks_as_it_did() -> None:
    check_golden("bench.txt", report.bench_view(measurement()).plain + "\n")


def test_a_failed_gate_looks_as_it_did() -> None:
    before, after = measurement(), measurement(number=7, mine=14.0, digest="b" * 64)
    comparison = bench.compare(before, after)
    verdict = bench.Gate.parse("median > +5%").check(comparison)
    view = report.bench_view(after, comparison, verdict)
    assert view.finding
    check_golden("bench_failed.txt", view.plain + "\n")


def test_a_measurement_that_passes_is_no_finding() -> None:
    measured = measurement()
    verdict = bench.Gate.parse("median > +5%").check(bench.against_stock(measured))
    assert not report.bench_view(measured, bench.against_stock(measured), verdict).finding


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product([*VIEWS, "compile", "defer"], ["serial", "compiled", "wasting"]),
        ("imports", "wasting"),
    ],
)
def test_no_line_is_wider_than_the_terminal(name: str, kind: str, width: int, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(kind)
    more = {"compile": report.compile_view, "defer": report.defer_view, "imports": report.imports_view}
    view = {**VIEWS, **more}[name](run, width=width)  # type: ignore[call-arg]
    fixed = ("@ when", "@ it", "    took", "next:", "job", "1 h", "4 h", "24 h", "7 days", "   ")
    for line in view.plain.splitlines():
        assert len(line) <= max(width, 80 if line.startswith(fixed) else 0), line


@pytest.mark.parametrize("name", VIEWS)
def test_labels_are_part_of_every_view_and_its_data(name: str, serial: Run) -> None:
    view = VIEWS[name](serial)
    assert f"! {LABEL}" in view.plain
    assert view.data["labels"] == [LABEL]


def test_labels_of_the_baseline_are_said_too(stock: Run, serial: Run) -> None:
    assert f"! {LABEL}" in report.ett_view(stock, serial).plain


@pytest.mark.parametrize("name", VIEWS)
def test_the_data_is_json_with_a_version(name: str, serial: Run) -> None:
    data = json.loads(json.dumps(VIEWS[name](serial).data))
    assert data["version"] == report.JSON_VERSION
    assert data["run"] == 7


@pytest.mark.parametrize("name", VIEWS)
def test_a_folder_that_was_renamed_has_no_number(name: str, serial: Run, tmp_path: Path) -> None:
    run = Run.load((tmp_path / "0007").rename(tmp_path / "kept"))
    data = VIEWS[name](run).data
    assert (data["run"], data["name"]) == (None, "kept")
    named = VIEWS[name](serial).data
    assert (named["run"], named["name"]) == (7, "0007")


def test_a_start_up_that_keeps_all_cores_busy_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path, overlapped_spans(), mode="overlap", cpu=4 * 9.2)
    view = report.summary(Run.load(path))
    assert view.data["core_bound"] == 9.2
    assert "CPU work that fills all cores of the host for 9.2s" in view.plain


def test_the_data_of_the_summary_adds_up(serial: Run) -> None:
    data = report.summary(serial).data
    assert data["work"] + data["wait"] + data["queue"] == pytest.approx(data["first_batch"]["1"])
    assert data["planned"] == pytest.approx(3.2 + 2.0 + 4.0 + 0.5)


def test_digests_are_not_in_the_bare_view(tmp_path: Path) -> None:
    run = Run.load(write_run(tmp_path, serial_spans(), digests={"state": "c0ffee"}))
    assert run.digests
    assert "c0ffee" not in report.summary(run).plain


def test_the_plan_keeps_steps_outside_the_graph(tmp_path: Path) -> None:
    graph = GRAPH.without("first_step")
    run = Run.load(write_run(tmp_path, serial_spans(), graph=graph))
    plan = {span.name: span for span in planned(run, 1)}
    assert plan["imports"].start == 0
    assert plan["model"].start == plan["imports"].end
    assert plan["first_step"].start == max(span.end for span in plan.values() if span.name != "first_step")


def test_the_plan_needs_a_graph(stock: Run) -> None:
    with pytest.raises(RecordError, match="no graph"):
        planned(stock, 0)


def test_a_rank_that_is_not_there(serial: Run) -> None:
    with pytest.raises(RecordError, match="there is no rank 3; recorded are 0-2"):
        report.blame(serial, 3)


def test_blame_counts_what_it_leaves_out(tmp_path: Path) -> None:
    spans = [Span(f"s{number}", number, number + 1) for number in range(12)]
    run = Run.load(write_run(tmp_path, [[*spans, Span("first_step", 12, 13)]], graph=None))
    assert "3 more steps, 3.0s together (--all)" in report.blame(run).plain
    assert "more steps" not in report.blame(run, everything=True).plain


def test_a_deep_chain_stays_within_the_terminal(tmp_path: Path) -> None:
    spans = [Span(f"s{number}", number, number + 1) for number in range(99)]
    run = Run.load(write_run(tmp_path, [[*spans, Span("first_step", 99, 100)]], graph=None))
    view = report.chain_view(run)
    assert len(view.data["chain"]) == 100
    assert max(len(line) for line in view.plain.splitlines()) <= 80


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0004, "0"),
        (0.0006, "1ms"),
        (0.64, "640ms"),
        (0.9994, "999ms"),
        (0.9996, "1.0s"),
        (104.34, "104.3s"),
    ],
)
def test_one_format_for_times(value: float, text: str) -> None:
    assert report.seconds(value) == text


def test_the_sentence(serial: Run) -> None:
    assert report.sentence(serial) == "first batch after 22.5s = 8.6s work + 2.8s wait + 11.1s queue"


def test_the_sentence_leaves_out_what_is_not_known(stock: Run) -> None:
    assert report.sentence(stock) == "first batch after 22.5s = 18.4s work + 4.1s wait"
