"""Effective training time: the share of a job's wall time spent on new data, and what a shorter start-up adds to it.

    ETT% = 1 - (time to start + failures x time to recover) / end-to-end wall time
    time to recover = time to start + lost work

A start-up is paid once at the start and once more after every failure, so a second saved is saved `1 + failures` times.
The formula holds the wall time fixed: what a start-up gives back is trained on. It does not know the times themselves
(see `record`), and it leaves out what `NOT_COUNTED` lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LOST_WORK = 465.0
"""Default seconds of training that a failure throws away: half the interval between two checkpoints.

The interval is the one that loses least, sqrt(2 x 86,400 s x 15 s / 3) = 929.5 s, for the example of Meta's post on
effective training time: saving blocks 15 s and a job fails 3 times a day. It is an assumption: better give your own.
"""

NOT_COUNTED = (
    "the time from the allocation of the hardware to the worker's first instruction",
    "finding out about a failure and getting hardware again",
    "stalls of checkpoints during training",
    "recompiles after the first batch",
    "shutdown",
)
"""What an ETT% of this file leaves out, because a recorded start-up holds no data on it. The true share is lower."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job to do the sums for: `wall` is its end-to-end time in seconds, `failures` the restarts within it."""

    name: str
    wall: float
    failures: float = 0


JOBS = (
    Job("1 h", 3_600.0),
    Job("4 h", 14_400.0),
    Job("24 h", 86_400.0, 3),
    Job("7 days", 604_800.0, 21),
)
"""Jobs for a first look, from none to 3 failures a day (the example of Meta's post); your own say more."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What one job gets from a start-up that takes another time. `before` and `after` are ETT as fractions of 1.

    `hours_back` are hours of training, summed over all ranks: GPU-hours where a rank is a GPU.
    """

    job: Job
    before: float
    after: float
    hours_back: float

    @property
    def points(self) -> float:
        """The gain in percentage points, below zero when the new start-up is longer."""
        return 100.0 * (self.after - self.before)


def ett(wall: float, start: float, failures: float = 0, recover: float = 0.0) -> float:
    """Share of `wall` seconds that is spent on new data, between 0 and 1.

    `start` is the time to start in seconds, `failures` their number, `recover` the seconds each one costs (see
    `time_to_recover`). A job whose starts and recoveries fill its wall time or more never trains: 0.

    >>> round(100 * ett(wall=86_400, start=100, failures=4, recover=400), 2)
    98.03

    Raises ValueError for a wall time that isn't positive, or a part that is negative or not a finite number.
    """
    if not (math.isfinite(wall) and wall > 0):
        raise ValueError(f"wall is {wall!r} s: give the job's end-to-end time in seconds, above 0")
    for name, value in (("start", start), ("failures", failures), ("recover", recover)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value!r}: give a finite number, 0 or more")
    return max(0.0, 1.0 - (start + failures * recover) / wall)


def time_to_recover(start: float, lost_work: float = LOST_WORK) -> float:
    """Seconds that one failure costs: a whole start-up and the training since the last checkpoint, both in seconds."""
    return start + lost_work


def gain(
    before: float, after: float, jobs: Iterable[Job] = JOBS, *, lost_work: float = LOST_WORK, ranks: int = 1
) -> tuple[Gain, ...]:
    """What each job gains when its time to start goes from `before` to `after` seconds: one `Gain` per job, in order.

    `lost_work` (seconds per failure) lowers both shares alike, so the gain itself hardly depends on it. `ranks`
    multiplies the hours given back. Raises ValueError as `ett` does, or for fewer than one rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks!r}: a job has at least one rank")
    gains = []
    for job in jobs:
        shares = [ett(job.wall, start, job.failures, time_to_recover(start, lost_work)) for start in (before, after)]
        hours = (shares[1] - shares[0]) * job.wall * ranks / 3_600.0
        gains.append(Gain(job, shares[0], shares[1], hours))
    return tuple(gains)
