"""`failures`: a step that fails on one rank ends the wait of the others for it, with an error that names the first.

Nobody can tell from outside whether a script that has caught an error will try again. So a rank that waits is only
told of an error that nobody can come back from: it has left the very step that this rank waits in (and the step was
not begun anew since), it ends the other rank's script, or that rank's process is gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from initopt.failure import PeerFailed
from initopt.optimize.statuses import Failed, Status
from initopt.peers import SILENCE
from initopt.process_id import is_gone

NAME = "failures"

GRACE = 0.3
"""Seconds in which a rank may begin its step anew before the others are told that it has failed."""


class Failures:
    """What is known of failures during one wait."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Failed, float]] = {}

    def among(self, own: Status, missing: Mapping[int, Status]) -> PeerFailed | None:
        """The failure for which this rank, which does `own`, need not wait for the missing ones any more."""
        found = None
        for rank, status in missing.items():
            failed = next((one for one in status.failed if one.for_good or one.left in own.steps), None)
            first, since = self._seen.get(rank, (None, 0.0))
            if failed is None:
                self._seen.pop(rank, None)
            elif failed != first:
                self._seen[rank] = failed, time.monotonic()
            if failed is not None and (failed.for_good or (failed == first and time.monotonic() - since >= GRACE)):
                # The cause before those who failed of it.
                found = failed.peer_error() if found is None or failed.rank == rank else found
            if is_gone(status.process):
                process = status.process
                text = f"its process (pid {process['pid']} on {process['host']}) is gone"
                return PeerFailed(rank, status.step, time.time() - status.since, text)
        return found


class Silence:
    """Finds ranks that have said nothing for long, and whose process can't be looked at from here."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[int, float]] = {}

    def of(self, missing: Mapping[int, Status]) -> int | None:
        """The first of the missing ranks that is silent, None where none is."""
        for rank, status in missing.items():
            beat, since = self._heard.get(rank, (-1, 0.0))
            if beat != status.beat:
                self._heard[rank] = status.beat, time.monotonic()
            elif time.monotonic() - since > SILENCE and is_gone(status.process) is not False:
                return rank
        return None
