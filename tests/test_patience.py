"""How long a rank waits for late ones, and how it names them."""

from __future__ import annotations

import time

import pytest

from initopt.optimize.failures import Failures, Silence
from initopt.optimize.patience import LIMIT, Patience, described
from initopt.optimize.statuses import Failed, Status, Waits, packed, unpacked
from initopt.process_id import this_process

WAITS = Waits("world.1/3", "world.1", 3, "barrier", "barrier", "train.py:9", (0, 1, 2), (0, 1, 2), 3, True, 4.0)


def status(**more: object) -> Status:
    return Status(since=time.time() - 5, process=this_process(), **more)  # type: ignore[arg-type]


def test_a_status_comes_back_as_it_was() -> None:
    failed = Failed(("dmp", 1), 2, "inner", 0.5, "KeyError: 'x'")
    one = status(steps=(("dmp", 1), ("plan", 2)), meeting=WAITS, failed=(failed,), counts={"world.1": 3})
    assert unpacked(packed(one).encode()) == one
    assert one.step == "plan" and one.came(WAITS) and not status().came(WAITS)


@pytest.mark.parametrize(
    ("longer", "lost", "limit"), [(True, False, LIMIT), (True, True, WAITS.timeout), (False, False, WAITS.timeout)]
)
def test_the_limit_is_the_group_s_where_nobody_may_come(
    longer: bool, lost: bool, limit: float, capsys: pytest.CaptureFixture[str]
) -> None:
    wait = Patience(1, WAITS, longer=longer)
    missing = {0: status(steps=(("features", 1),), line="train.py:3", lost=lost)}
    assert wait.is_over(missing, limit - 0.1, speaks=True) is None
    assert capsys.readouterr().err.count("rank 0 has been for 5.0 s in step 'features', now at train.py:3") == longer
    error = wait.is_over(missing, limit, speaks=False)
    assert str(error).startswith(f"rank 1 waited {limit:.0f} s in barrier (train.py:9) for rank 0 has been")


def test_who_waits_is_named_ever_more_rarely(capsys: pytest.CaptureFixture[str]) -> None:
    wait = Patience(1, WAITS, longer=True)
    for seconds in range(1, 30):
        assert wait.is_over({0: status()}, float(seconds), speaks=seconds != 2) is None
    assert len(capsys.readouterr().err.splitlines()) == 4  # at 3, 4, 8 and 16 s


def test_ranks_that_do_the_same_are_named_together() -> None:
    told = described({0: status(), 2: status(), 3: status(steps=(("plan", 1),))})
    assert told == "ranks 0, 2 have been for 5.0 s in no step; rank 3 has been for 5.0 s in step 'plan'"


def test_a_step_that_is_begun_anew_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    failed = Failed(("dmp", 1), 0, "dmp", 0.1, "ValueError: no")
    own, failures = status(steps=(("dmp", 1),)), Failures()
    for seconds, now in [(0.0, (failed,)), (0.2, ()), (0.4, (failed,)), (0.6, (failed,))]:
        clock[0] = seconds
        assert failures.among(own, {0: status(failed=now)}) is None
    clock[0] = 0.8
    assert str(failures.among(own, {0: status(failed=(failed,))})).endswith("after 0.1 s: ValueError: no")
    # Who is not in that step is not told.
    elsewhere = Failures()
    for clock[0] in (2.0, 3.0):
        assert elsewhere.among(status(steps=(("dmp", 2),)), {0: status(failed=(failed,))}) is None


def test_a_rank_elsewhere_that_says_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    here, elsewhere = status(beat=1), status(beat=1).but(process={**this_process(), "host": "elsewhere"})
    silence = Silence()
    assert silence.of({0: here, 1: elsewhere}) is None
    clock[0] = 61.0
    # A process that can be looked at is there, whatever it does.
    assert silence.of({0: here, 1: elsewhere}) == 1
    assert silence.of({0: here, 1: elsewhere.but(beat=2)}) is None
