"""`--optimize` where one rank fails, is late or comes elsewhere: the others hear of it, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from initopt.optimizations import NAMES
from initopt.runs import Run
from tests.multirank.arriving_ranks import LATE, TIMEOUT, differing, ending, failing
from tests.multirank.forked import fork_ranks

LIMIT = 60.0


def test_a_step_that_fails_or_is_late_on_one_rank(tmp_path: Path) -> None:
    zero, one = fork_ranks(failing, str(tmp_path), NAMES, timeout=LIMIT)
    assert [zero["alike"], one["alike"]] == ["ValueError: on rank 0", "ValueError: on rank 1"]
    assert zero["optional"] == one["optional"] == "met"
    assert zero["constructor"] == "AttributeError: no strategy"
    assert one["constructor"].startswith("PeerFailed: rank 0 failed in start-up step 'dmp' after 0.")
    assert one["constructor"].endswith("s: AttributeError: no strategy")
    assert zero["after it"] == one["after it"] == "met"
    assert one["in a step"] == "KeyError: 'x'"
    assert zero["in a step"].startswith("PeerFailed: rank 1 failed in start-up step 'inner'")
    assert zero["late"] == one["late"] == str(TIMEOUT)
    for found in (zero, one):
        assert found["misfit"].startswith("PlanError: the sharding plan does not fit this job")
        assert "table 'ebc.t0' has 48 rows x 8 in the plan and 64 rows x 8 in the model" in found["misfit"]
    assert one["no block on one"] == "MemoryError: no room"
    assert zero["no block on one"].startswith("PeerFailed: rank 1 failed in start-up step 'dmp' after ")
    assert zero["together again"] == one["together again"] == "met"
    assert zero["no block"] == one["no block"] == "Logged"
    assert zero["made"] == one["made"] == "Logged"
    assert [found["left"] + found["threads"] for found in (zero, one)] == [[], []]
    assert [(found["init after"], found["subclasses"]) for found in (zero, one)] == [(True, False)] * 2
    run = Run.load(tmp_path / "0001")
    (features,) = [span for span in run.spans if span.name == "features"]
    assert features.rank == 0 and features.end - features.start >= LATE
    waits = [span for span in run.of_rank(1) if span.op == "barrier" and span.wait > TIMEOUT]
    assert len(waits) == 1
    told = {(one.name, one.applied) for one in run.optimized if one.rank == 1}
    assert {("failures", True), ("patience", True)} <= told


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("members", ("new group 3 of the job", "new_group for ranks 0, backend", "rank 1: new_group for ranks 1, ")),
        ("order", ("meeting 3 of all ranks", "all_reduce on group 2 at ", "all_reduce on group 1 at ")),
    ],
)
def test_meetings_that_differ_are_stopped_on_all_ranks(kind: str, says: tuple[str, ...], tmp_path: Path) -> None:
    found = fork_ranks(differing, kind, str(tmp_path), NAMES, timeout=LIMIT)
    for error, after in found:
        assert error.startswith("Disagreement: ")
        assert all(words in error for words in says), error
        assert "arriving_ranks.py:" in error
        # What comes next is torch's own.
        assert after == "met"


@pytest.mark.parametrize(
    ("how", "says"),
    [("exception", "rank 0 failed: "), ("killed", "rank 0 failed")],
)
def test_a_rank_that_ends_is_not_waited_for(how: str, says: str, tmp_path: Path) -> None:
    _, found = fork_ranks(ending, str(tmp_path), NAMES, how, timeout=LIMIT)
    assert found.startswith(f"PeerFailed: {says}")
    assert ("MemoryError: no room" if how == "exception" else "is gone") in found
