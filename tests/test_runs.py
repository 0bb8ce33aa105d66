"""Reading a run: one axis, waits by matching, and what is said about a record that is incomplete or broken."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from initopt.graph import Graph, Step
from initopt.record import FIRST_STEP, Header, Recorder, Span
from initopt.runs import RecordError, Run
from tests import synthetic

TRAILER = {"kind": "trailer", "end": 9.0, "own_cost": 0.25, "peak_rss": 1}


def header(rank: int, world_size: int = 2, *, start: float = 1000.0, clock: str = "boot") -> Header:
    return Header(rank, world_size, "dlrm", "stock", f"host-{clock}", 1, start, 2, clock=clock)


def write(path: Path, head: Header, spans: Iterable[Span], *more: dict[str, Any]) -> Path:
    """The file of one rank, with a trailer unless other last lines are given."""
    path.mkdir(parents=True, exist_ok=True)
    rank = head.rank
    records = [{"kind": "header", **asdict(head)}, *(asdict(replace(s, rank=rank)) for s in spans)]
    records += [{"rank": rank, **line} for line in (more or (TRAILER,))]
    file = path / f"rank{rank:05}.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def meet(op: str, start: float, end: float, sequence: int = 0, **about: Any) -> Span:
    return Span(op, start, end, kind="collective", op=op, group="world", sequence=sequence, **about)


def waits(run: Run, name: str) -> list[float]:
    return [round(s.wait, 6) for rank in run.headers for s in run.of_rank(rank) if s.name == name]


def test_a_wait_lasts_until_the_last_rank_came(tmp_path: Path) -> None:
    for rank, start in enumerate([1.0, 4.0, 2.5]):
        write(tmp_path / "0001", header(rank, 3), [meet("barrier", start, 4.5)])
    assert waits(Run.load(tmp_path / "0001"), "barrier") == [3.0, 0.0, 1.5]


def test_a_rank_that_came_after_one_had_left_was_not_waited_for(tmp_path: Path) -> None:
    for rank, (start, end) in enumerate([(2.0, 2.25), (1.0, 2.5), (9.0, 9.25)]):
        write(tmp_path / "0001", header(rank, 3), [meet("broadcast", start, end)])
    assert waits(Run.load(tmp_path / "0001"), "broadcast") == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("cores", "host_cores", "bound"),
    [(2, 2, 15.0), (2, 4, 7.5), (4, 64, 3.75), (2, 0, 15.0)],
    ids=["shared", "cores of its own for each rank", "part of the host", "a record that does not say"],
)
def test_cpu_work_takes_what_all_cores_of_the_host_need(
    tmp_path: Path, cores: int, host_cores: int, bound: float
) -> None:
    for rank, cpu in enumerate([10.0, 20.0]):
        head = replace(header(rank), cores=cores, host_cores=host_cores)
        write(tmp_path / "0001", head, [], {"kind": "usage", "at": 9.0, "cpu": cpu}, TRAILER)
    assert Run.load(tmp_path / "0001").core_bound == bound


def test_the_busiest_host_bounds_the_run(tmp_path: Path) -> None:
    for rank, cpu in enumerate([10.0, 20.0]):
        head = header(rank, clock=f"of {rank}")
        write(tmp_path / "0001", head, [], {"kind": "usage", "at": 9.0, "cpu": cpu}, TRAILER)
    assert Run.load(tmp_path / "0001").core_bound == 10.0


def test_process_starts_are_put_on_one_axis(tmp_path: Path) -> None:
    first = Span(FIRST_STEP, 3.0, 5.0)
    write(tmp_path / "0007", header(0, start=1002.0), [meet("barrier", 1.0, 3.0), first])
    write(tmp_path / "0007", header(1, start=1000.0), [meet("barrier", 2.0, 5.0), first])
    run = Run.load(tmp_path / "0007")
    assert run.number == 7
    assert run.zero == {0: 2.0, 1: 0.0}
    assert [(s.rank, s.start) for s in run.spans] == [(1, 2.0), (0, 3.0), (1, 3.0), (0, 5.0)]
    assert waits(run, "barrier") == [0.0, 1.0]
    assert [run.first_batch(rank) for rank in (0, 1)] == [5.0, 5.0]
    assert (run.own_cost, run.missing_ranks, run.warnings) == (0.25, (), ())


def test_a_step_waits_what_the_meetings_inside_it_waited(tmp_path: Path) -> None:
    spans = [
        Span("outer", 0.0, 10.0),
        Span("inner", 1.0, 5.0, step="outer"),
        meet("barrier", 2.0, 4.0, 0, step="inner"),
        meet("barrier", 6.0, 7.0, 1, step="outer"),
        Span("reader", 0.0, 10.0, lane="io:data"),
        Span("elsewhere", 11.0, 12.0),
    ]
    write(tmp_path / "0001", header(0), spans)
    write(tmp_path / "0001", header(1), [meet("barrier", 3.5, 4.0, 0), meet("barrier", 6.5, 7.0, 1)])
    run = Run.load(tmp_path / "0001")
    found = {s.name: s.wait for s in run.of_rank(0) if s.kind == "step"}
    assert found == {"outer": 2.0, "inner": 1.5, "reader": 0.0, "elsewhere": 0.0}


def test_a_meeting_on_another_lane_counts_for_the_step_it_names(tmp_path: Path) -> None:
    spans = [Span("pg", 0.0, 4.0, lane="comms"), meet("barrier", 1.0, 3.0, step="pg", lane="Thread-7")]
    write(tmp_path / "0001", header(0), spans)
    write(tmp_path / "0001", header(1), [meet("barrier", 2.0, 3.0)])
    assert waits(Run.load(tmp_path / "0001"), "pg") == [1.0]


def test_different_calls_are_no_meeting_and_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "0001", header(0), [meet("barrier", 1.0, 3.0, call_site="a.py:1")])
    write(tmp_path / "0001", header(1), [meet("broadcast", 2.0, 3.0, call_site="b.py:2")])
    run = Run.load(tmp_path / "0001")
    assert [s.wait for s in run.spans] == [0.0, 0.0]
    assert run.warnings == (
        "the ranks differ in call 0 on group world: rank 0 barrier (a.py:1), rank 1 broadcast (b.py:2)",
    )
    assert run.meeting(run.spans[0]) == (run.spans[0],)


def test_a_call_that_only_hands_over_has_no_wait(tmp_path: Path) -> None:
    write(tmp_path / "0001", header(0), [meet("all_reduce", 1.0, 3.0, async_op=True)])
    write(tmp_path / "0001", header(1), [meet("all_reduce", 2.0, 3.0, async_op=True)])
    assert waits(Run.load(tmp_path / "0001"), "all_reduce") == [0.0, 0.0]


def test_the_spans_of_one_meeting_are_found_from_each_of_them(tmp_path: Path) -> None:
    for rank in range(3):
        spans = [meet("barrier", 1.0 + rank, 4.0, 0), meet("barrier", 5.0, 6.0, 1), Span("model", 7.0, 8.0)]
        write(tmp_path / "0001", header(rank, 3), spans)
    run = Run.load(tmp_path / "0001")
    for span in run.spans:
        met = run.meeting(span)
        if span.kind == "step":
            assert met == (span,)
        else:
            assert [s.rank for s in met] == [0, 1, 2]
            assert {s.sequence for s in met} == {span.sequence}


def test_clocks_of_hosts_are_aligned_by_the_ends_of_their_meetings(tmp_path: Path) -> None:
    # Host b is 50 s ahead; one of its meetings ended late, which the median leaves out.
    spans = [meet("all_reduce", 1.0 * n, 1.0 * n + 0.5, n) for n in range(5)]
    late = [replace(s, end=s.end + (0.25 if s.sequence == 1 else 0.0)) for s in spans]
    write(tmp_path / "0001", header(0, 3, clock="a"), spans)
    write(tmp_path / "0001", header(1, 3, clock="b", start=1050.0), late)
    write(
        tmp_path / "0001",
        header(2, 3, clock="b", start=1051.0),
        [replace(s, start=s.start - 1, end=s.end - 1) for s in late],
    )
    run = Run.load(tmp_path / "0001")
    assert run.zero == {0: 0.0, 1: 0.0, 2: 1.0}
    assert run.warnings == ()


@pytest.mark.parametrize("op", ["store.barrier", "monitored_barrier", "reduce_scatter"])
def test_clocks_are_aligned_by_whatever_all_leave_together(tmp_path: Path, op: str) -> None:
    write(tmp_path / "0001", header(0, clock="a"), [meet(op, 1.0, 2.0)])
    write(tmp_path / "0001", header(1, clock="b", start=1050.0), [meet(op, 1.5, 2.0)])
    run = Run.load(tmp_path / "0001")
    assert run.zero == {0: 0.0, 1: 0.0} and run.warnings == ()


def test_a_host_is_aligned_through_another_one(tmp_path: Path) -> None:
    def on(group: str, **about: Any) -> Span:
        return replace(meet("barrier", 1.0, 2.0), group=group, **about)

    write(tmp_path / "0001", header(0, 3, clock="a"), [on("1")])
    write(tmp_path / "0001", header(1, 3, clock="b", start=900.0), [on("1"), on("2")])
    write(tmp_path / "0001", header(2, 3, clock="c", start=500.0), [on("2", start=2.0, end=4.0)])
    run = Run.load(tmp_path / "0001")
    assert run.zero == {0: 2.0, 1: 2.0, 2: 0.0}


def test_a_host_without_a_common_meeting_keeps_its_wall_clock_and_is_named(tmp_path: Path) -> None:
    write(tmp_path / "0001", header(0, clock="a"), [meet("broadcast", 1.0, 2.0)])
    write(tmp_path / "0001", header(1, clock="b", start=1003.0), [meet("broadcast", 1.0, 2.0)])
    run = Run.load(tmp_path / "0001")
    assert run.zero == {0: 0.0, 1: 3.0}
    assert len(run.warnings) == 1 and "host-b (rank 1)" in run.warnings[0]


def test_an_older_record_says_nothing_of_meetings_left_out(tmp_path: Path) -> None:
    note = {"kind": "note", "text": "1 meeting of ranks was left out (1 by plan)", "step": "dmp"}
    said = {"kind": "optimized", "name": "eliminate", "applied": True, "text": "as above", "place": "a.py:1"}
    write(tmp_path / "0001", header(0, 1), [], note, said, TRAILER)
    run = Run.load(tmp_path / "0001")
    assert [one.left_out for one in (*run.notes, *run.optimized)] == [(), ()]


def test_a_rank_without_a_file_is_listed(tmp_path: Path) -> None:
    write(tmp_path / "0001", header(1, 4), [])
    assert Run.load(tmp_path / "0001").missing_ranks == (0, 2, 3)


def test_a_rank_that_never_trained_is_told_how_to_name_the_step(tmp_path: Path) -> None:
    file = write(tmp_path / "0001", header(0, 1), [Span(FIRST_STEP, 1.0, 2.0, error="ValueError")])
    with pytest.raises(RecordError, match=r"no finished step 'first_step'.*initopt\.step\('first_step'\)") as caught:
        Run.load(tmp_path / "0001").first_batch(0)
    assert caught.value.path == file


def test_a_half_written_last_line_is_left_out_and_reported(tmp_path: Path) -> None:
    file = write(tmp_path / "0001", header(0, 1), [Span("model", 1.0, 2.0)])
    text = file.read_text()
    file.write_text(text[: text.rindex('"end"')])
    run = Run.load(tmp_path / "0001")
    assert [s.name for s in run.spans] == ["model"]
    assert [w.removeprefix(f"{file}") for w in run.warnings] == [
        " line 3: half-written, left out: the process ended meanwhile",
        ": the record ends without its last line: the process ended before it was closed, or goes on",
    ]


def test_a_file_without_a_header_leaves_its_rank_missing(tmp_path: Path) -> None:
    write(tmp_path / "0001", header(0), [])
    (tmp_path / "0001" / "rank00001.jsonl").write_text('{"kind":"hea')
    run = Run.load(tmp_path / "0001")
    assert run.missing_ranks == (1,)
    assert any("rank00001.jsonl: there is no header" in warning for warning in run.warnings)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "this is no JSON"),
        ("[1]", "this is no JSON object"),
        ("[" * 10_000, "this is no JSON: maximum recursion depth"),
        ('{"kind": "step", "name": "model", "end": 1.0}', "span: `start` is missing"),
        ('{"kind": "step", "name": "model", "start": "now", "end": 1.0}', "Expected `float`, got `str`"),
        ('{"kind": "group", "name": "1"}', "a group needs `name` and `ranks`"),
        ('{"kind": "poem"}', "`kind` is 'poem'"),
        ('{"kind": "header"}', "the first line, and no other, must be the header"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    file = write(tmp_path / "0001", header(0, 1), [])
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(RecordError) as caught:
        Run.load(tmp_path / "0001")
    assert str(caught.value).startswith(f"{file} line 3: ") and problem in str(caught.value)
    assert (caught.value.path, caught.value.line) == (file, 3)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "0001", replace(header(0, 1), format=99), [])
    with pytest.raises(RecordError, match="written by a newer initopt: format 99, this reads 1"):
        Run.load(tmp_path / "0001")


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "0001", header(0, 1), [])
    (file.parent / "rank00001.jsonl").write_text(file.read_text())
    with pytest.raises(RecordError, match=r"rank00001.jsonl line 1: rank 0 has another file"):
        Run.load(tmp_path / "0001")


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="there is no run here"):
        Run.load(tmp_path)
    with pytest.raises(RecordError, match="no run has been recorded here"):
        Run.latest(tmp_path / "nowhere")


def test_latest_is_the_newest_with_a_file_and_the_link_leads_to_a_number(tmp_path: Path) -> None:
    for number in ("0002", "0010"):
        write(tmp_path / number, header(0, 1), [])
    (tmp_path / "0011").mkdir()
    os.symlink("0010", tmp_path / "latest")
    assert Run.latest(tmp_path).number == 10
    assert Run.load(tmp_path / "latest").number == 10


def test_digests_trailers_and_groups_are_kept_per_rank(tmp_path: Path) -> None:
    digest = {"kind": "digest", "name": "state", "sha256": "ab", "about": {"tensors": 3}}
    for rank in range(2):
        group = {"kind": "group", "name": "1", "ranks": [0, 1]}
        write(tmp_path / "0001", header(rank), [], digest, group, {**TRAILER, "own_cost": rank + 0.5})
    run = Run.load(tmp_path / "0001")
    assert [(d.rank, d.name, d.sha256, d.about) for d in run.digests] == [
        (r, "state", "ab", {"tensors": 3}) for r in (0, 1)
    ]
    assert run.groups == {"1": (0, 1)}
    assert {rank: t.own_cost for rank, t in run.trailers.items()} == {0: 0.5, 1: 1.5}
    assert run.own_cost == 1.5


def test_the_graph_comes_back_with_the_run(tmp_path: Path) -> None:
    graph = Graph([Step("model"), Step("shard", needs=("model",))], name="dlrm")
    Recorder("dlrm", mode="overlap", root=tmp_path, graph=graph).close()
    found = Run.latest(tmp_path).graph
    assert found is not None and found.digest() == graph.digest()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"steps": 3}'])
def test_a_broken_graph_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path / "0001", header(0, 1), [])
    (tmp_path / "0001" / "graph.json").write_text(text)
    with pytest.raises(RecordError, match=r"0001/graph\.json: "):
        Run.load(tmp_path / "0001")


def test_packages_belong_to_the_step_that_they_were_imported_in(tmp_path: Path) -> None:
    spans = [Span("imports", 0, 3, kind="import"), Span("import torch", 0.5, 2, kind="import")]
    spans += [Span("import late", 3.2, 3.6, kind="import"), Span("train.py:4-9", 3, 4), Span("first_step", 4, 5)]
    spans += [Span("import elsewhere", 1, 2, lane="io", kind="import")]
    run = Run.load(synthetic.write_run(tmp_path, [spans], graph=None))
    steps = {span.name: span.step for span in run.spans if span.name.startswith("import ")}
    assert steps == {"import torch": "imports", "import late": "train.py:4-9", "import elsewhere": ""}
