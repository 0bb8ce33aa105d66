"""ETT% moves the right way for every job: more start-up, more failures, more lost work never raise it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from initopt.ett import Job, ett, gain, time_to_recover

seconds = st.floats(min_value=0, max_value=1e6)
walls = st.floats(min_value=1, max_value=1e7)
counts = st.integers(min_value=0, max_value=1_000)


@given(walls, seconds, counts, seconds)
def test_it_is_a_share(wall: float, start: float, failures: int, recover: float) -> None:
    assert 0.0 <= ett(wall, start, failures, recover) <= 1.0


@given(walls, seconds, seconds, counts, seconds)
def test_a_longer_start_never_raises_it(wall: float, start: float, more: float, failures: int, lost: float) -> None:
    short = ett(wall, start, failures, time_to_recover(start, lost))
    long = ett(wall, start + more, failures, time_to_recover(start + more, lost))
    assert long <= short


@given(walls, seconds, counts, counts, seconds)
def test_more_failures_never_raise_it(wall: float, start: float, failures: int, more: int, recover: float) -> None:
    assert ett(wall, start, failures + more, recover) <= ett(wall, start, failures, recover)


@given(walls, seconds, counts, seconds, seconds)
def test_more_lost_work_never_raises_it(wall: float, start: float, failures: int, lost: float, more: float) -> None:
    less = ett(wall, start, failures, time_to_recover(start, lost))
    assert ett(wall, start, failures, time_to_recover(start, lost + more)) <= less


@given(walls, walls, seconds)
def test_a_longer_job_never_lowers_it(wall: float, more: float, start: float) -> None:
    assert ett(wall + more, start) >= ett(wall, start)


@given(walls, seconds, seconds, counts, st.integers(min_value=1, max_value=4_096))
def test_a_gain_is_undone_by_its_opposite(wall: float, before: float, after: float, failures: int, ranks: int) -> None:
    job = Job("job", wall, failures)
    (there,) = gain(before, after, [job], ranks=ranks)
    (back,) = gain(after, before, [job], ranks=ranks)
    assert there.points == -back.points
    assert there.hours_back == -back.hours_back
    assert (there.points >= 0) == (after <= before) or there.points == 0
