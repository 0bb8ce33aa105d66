"""A start-up run again: as recorded with all calls, and without some of them later waits take the place of earlier."""

from __future__ import annotations

from pathlib import Path

import pytest

from initopt.comm_elim.passes import find
from initopt.comm_elim.resimulate import Resimulation, call_of
from initopt.runs import Run
from tests.comm_elim.recorded import Script, stock
from tests.synthetic import GRAPH, overlapped_spans, serial_spans, write_run


@pytest.mark.parametrize("kind", ["stock", "serial", "overlapped"])
def test_with_all_calls_it_is_as_recorded(tmp_path: Path, kind: str) -> None:
    if kind == "stock":
        run = stock().run(tmp_path)
    else:
        spans = serial_spans() if kind == "serial" else overlapped_spans()
        run = Run.load(write_run(tmp_path, spans, graph=GRAPH if kind == "overlapped" else None))
    assert Resimulation(run).first_batches(()) == pytest.approx({rank: run.first_batch(rank) for rank in run.headers})


def test_a_wait_moves_to_the_next_meeting(tmp_path: Path) -> None:
    script = Script()
    script.meet("barrier", late={2: 5.0})
    script.meet("all_reduce")
    run = script.run(tmp_path)
    barrier = [span for span in run.spans if span.op == "barrier"]
    assert max(span.wait for span in barrier) == pytest.approx(5.0)
    assert Resimulation(run).savings([set(map(call_of, barrier))]) == pytest.approx([script.took])


def test_a_wait_that_nobody_needs_is_saved(tmp_path: Path) -> None:
    script = Script()
    script.meet("barrier", late={2: 5.0})
    for rank in (0, 1, 3):
        script.now[rank] += 5.0
    run = script.run(tmp_path)
    gone = {call_of(span) for span in run.spans if span.op == "barrier"}
    assert Resimulation(run).savings([gone, ()]) == pytest.approx([5.0 + script.took, 0.0])


def test_of_what_is_assumed_one_meeting_stays(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in find(stock().run(tmp_path)).findings}
    assert found["validation_flag"].saving == 0.0
    # The last of four stays; rank 3 comes late to each, by work that nothing removes.
    assert found["ec_metadata"].saving == pytest.approx(0.03)


def test_together_they_save_no_more_than_was_spent(tmp_path: Path) -> None:
    run = stock().run(tmp_path)
    found = find(run)
    assert max(one.saving for one in found.findings) <= found.saving
    own = sum(s.end - s.start - s.wait for s in run.of_rank(3) if s.kind == "collective")
    assert found.saving <= own + 1e-9
