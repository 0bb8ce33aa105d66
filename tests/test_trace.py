"""The Chrome trace of a run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from initopt import trace
from initopt.chain import critical_chain
from initopt.record import Span
from initopt.runs import Run
from tests.synthetic import GRAPH, overlapped_spans, write_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.load(write_run(tmp_path, overlapped_spans(), mode="overlap", labels=("emulated: 20 ms a collective",)))


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in trace.chrome_trace(run)["traceEvents"] if event["ph"] == kind]


def test_every_span_is_a_slice_on_its_lane(run: Run) -> None:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(run, "M") if e["name"] == "thread_name"}
    found = {(names[e["pid"], e["tid"]], e["name"], e["ts"]) for e in events(run, "X") if e["pid"]}
    assert found == {(f"rank {s.rank} {s.lane}", s.name, round(1e6 * s.start, 3)) for s in run.spans}


def test_a_host_is_a_process(run: Run) -> None:
    names = [e["args"]["name"] for e in events(run, "M") if e["name"] == "process_name"]
    assert names == ["host trn-01", "host trn-02", "longest chain"]


def test_arrows_are_the_needs_on_every_rank(run: Run) -> None:
    needs = [edge for edge in GRAPH.edges if edge.kind != "resource"]
    starts, ends = events(run, "s"), events(run, "f")
    assert len(starts) == len(ends) == 3 * len(needs)
    assert {e["id"] for e in starts} == {e["id"] for e in ends}
    assert len({e["id"] for e in starts}) == len(starts)


def test_the_longest_chain_has_no_overlaps(tmp_path: Path) -> None:
    from tests.synthetic import serial_spans

    run = Run.load(write_run(tmp_path, serial_spans()))
    chain = [e for e in events(run, "X") if e["pid"] == 0]
    assert len(chain) == len(critical_chain(run))
    for before, after in zip(chain, chain[1:], strict=False):  # noqa: RUF007
        assert before["ts"] + before["dur"] <= after["ts"] + 0.01
    assert {e["name"] for e in chain} >= {"shard (rank 0)", "shard (rank 2)"}


def test_labels_travel_with_the_trace(run: Run) -> None:
    assert trace.chrome_trace(run)["otherData"]["labels"] == ["emulated: 20 ms a collective"]


def test_the_file_is_json_and_always_the_same(run: Run) -> None:
    packed = trace.encode(run, compressed=True)
    assert packed == trace.encode(run, compressed=True)
    assert json.loads(gzip.decompress(packed)) == json.loads(trace.encode(run)) == trace.chrome_trace(run)


def test_a_start_up_that_stopped_has_a_trace_without_a_chain(tmp_path: Path) -> None:
    run = Run.load(write_run(tmp_path, [[Span("model", 0, 1, error="OSError")]]))
    assert [e["args"]["error"] for e in events(run, "X")] == ["OSError"]


def test_a_collective_is_drawn_inside_its_step(tmp_path: Path) -> None:
    meeting = Span("barrier", 0.5, 1, lane="a thread", kind="collective", step="shard", op="barrier", group="world")
    run = Run.load(write_run(tmp_path, [[Span("shard", 0, 1, lane="comms"), meeting]], graph=None))
    assert len({event["tid"] for event in events(run, "X")}) == 1
