"""`patience`: until the first training step a late rank is waited for longer than its group's timeout, and named.

The timeout of a group is for its collectives, and stays as the script has set it: the wait that is longer comes before
the call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from initopt.optimize.statuses import Status, Waits
from initopt.rank_numbers import ranks_in_short

NAME = "patience"

LIMIT = 1800.0
"""Seconds that a rank waits for late ones during the start-up, or the group's timeout where that is more."""
SPEAK = 2.0
"""Seconds until the others are named for the first time; then after twice as long, and so on, up to `RARELY`."""
RARELY = 60.0


class Patience:
    """One wait of `rank`: how long it may be, and who is told of it. If not `longer`, it is for the group's timeout."""

    def __init__(self, rank: int, waits: Waits, *, longer: bool) -> None:
        self._rank = rank
        self._waits = waits
        self._longer = longer
        self._speaks = SPEAK

    def is_over(self, missing: Mapping[int, Status], waited: float, *, speaks: bool) -> RuntimeError | None:
        """The error to raise where it was too long; else the missing ranks are named, if this one `speaks`."""
        # Who has failed may never come, and stock would not wait either.
        longer = self._longer and not any(status.lost for status in missing.values())
        if waited >= (max(self._waits.timeout, LIMIT) if longer else self._waits.timeout):
            return RuntimeError(
                f"rank {self._rank} waited {waited:.0f} s in {self._waits.words} ({self._waits.place}) for "
                f"{described(missing)}"
            )
        if self._longer and speaks and missing and waited >= self._speaks:
            self._speaks += min(self._speaks, RARELY)
            text = f"rank {self._rank} waits in {self._waits.words} ({self._waits.place}) for {waited:.1f} s"
            print(f"initopt: {text}: {described(missing)}", file=sys.stderr, flush=True)
        return None


def described(missing: Mapping[int, Status]) -> str:
    """What the missing ranks are doing, those that do the same together."""
    doing: dict[str, list[int]] = {}
    for rank, status in sorted(missing.items()):
        at = f", now at {status.line}" if status.line else ""
        doing.setdefault(f"in {f'step {status.step!r}' if status.step else 'no step'}{at}", []).append(rank)
    parts = []
    for what, ranks in doing.items():
        seconds = max(0.0, time.time() - min(missing[rank].since for rank in ranks))
        who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {ranks_in_short(ranks)} have"
        parts.append(f"{who} been for {seconds:.1f} s {what}")
    return "; ".join(parts) or "nobody"
