"""The formula against values worked out by hand, and what it refuses."""

from __future__ import annotations

import doctest
import math

import pytest

from initopt import ett as module
from initopt.ett import JOBS, LOST_WORK, NOT_COUNTED, Job, ett, gain, time_to_recover


@pytest.mark.parametrize(
    ("wall", "start", "failures", "lost", "percent"),
    [
        (3_600, 157.7, 0, 300, 95.62),
        (3_600, 104.3, 0, 300, 97.10),
        (14_400, 157.7, 0, 300, 98.90),
        (86_400, 157.7, 4, 300, 97.70),
        (86_400, 104.3, 4, 300, 98.01),
        (604_800, 157.7, 10, 300, 99.22),
        (604_800, 104.3, 10, 300, 99.31),
        (1_000, 100, 1, 150, 65.00),
        (1_000, 0, 0, 0, 100.00),
    ],
)
def test_golden_values(wall: float, start: float, failures: int, lost: float, percent: float) -> None:
    share = ett(wall, start, failures, time_to_recover(start, lost))
    assert round(100 * share, 2) == percent


def test_a_failure_costs_a_start_and_the_lost_work() -> None:
    assert time_to_recover(100.0, 300.0) == 400.0
    assert time_to_recover(100.0) == 100.0 + LOST_WORK


def test_default_lost_work_is_half_the_interval_it_names() -> None:
    interval = math.sqrt(2 * 86_400 * 15 / 3)
    assert pytest.approx(interval / 2, abs=0.5) == LOST_WORK


def test_gain_counts_the_start_once_more_per_failure() -> None:
    (row,) = gain(157.7, 104.3, [Job("24 h", 86_400.0, 4)], lost_work=300.0, ranks=128)
    assert round(100 * row.before, 2) == 97.70
    assert round(100 * row.after, 2) == 98.01
    assert round(row.points, 2) == 0.31
    assert row.hours_back == pytest.approx(5 * (157.7 - 104.3) * 128 / 3_600)


def test_gain_of_every_default_job_in_order() -> None:
    rows = gain(100.0, 60.0)
    assert tuple(row.job for row in rows) == JOBS
    assert all(row.points > 0 for row in rows)


def test_a_longer_start_up_is_a_loss() -> None:
    (row,) = gain(60.0, 100.0, [Job("1 h", 3_600.0)])
    assert row.points < 0
    assert row.hours_back < 0


def test_a_job_that_never_trains_gives_nothing_back_before_it_does() -> None:
    (row,) = gain(9_000.0, 1_800.0, [Job("1 h", 3_600.0)])
    assert row.before == 0.0
    assert row.after == 0.5
    assert row.hours_back == 0.5


@pytest.mark.parametrize("wall", [0, -1, math.nan, math.inf])
def test_wall_must_be_positive(wall: float) -> None:
    with pytest.raises(ValueError, match=r"wall is .* end-to-end time in seconds"):
        ett(wall, 1.0)


@pytest.mark.parametrize("bad", [{"start": -1.0}, {"failures": -1}, {"recover": math.nan}, {"start": math.inf}])
def test_the_refused_part_is_named(bad: dict[str, float]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=f"^{name} is"):
        ett(**{"wall": 100.0, "start": 1.0, **bad})


def test_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks is 0"):
        gain(2.0, 1.0, ranks=0)


def test_it_says_what_is_not_counted() -> None:
    assert any("checkpoint" in line for line in NOT_COUNTED)
    assert any("shutdown" in line for line in NOT_COUNTED)


def test_the_example_in_the_docs_is_true() -> None:
    result = doctest.testmod(module)
    assert result.attempted >= 1
    assert result.failed == 0
