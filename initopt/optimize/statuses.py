"""What a rank tells the others of itself during a start-up, as a line of JSON in the job's store."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from initopt.failure import PeerFailed
from initopt.peers import describe


@dataclass(frozen=True, slots=True)
class Waits:
    """A meeting that a rank has come to: the `number`th of its group. `needs` are the ranks that it waits for, if it
    `waits`; `timeout` (s) is the group's.

    Of the making of a group of some ranks these are `made`; it is waited for the others for a moment only.
    `large` counts the meetings of all ranks of the job; it is 0 where this is none, or one that might return earlier.
    """

    key: str
    group: str
    number: int
    op: str
    words: str
    place: str
    members: tuple[int, ...]
    needs: tuple[int, ...]
    large: int
    waits: bool
    timeout: float
    made: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A step that was left by an exception: its name and number, and what failed first, after `elapsed` seconds.

    That may be one inside of it, or one on another `rank`. `for_good` if the rank ends with it.
    """

    left: tuple[str, int]
    rank: int
    step: str
    elapsed: float
    error: str
    for_good: bool = False

    def peer_error(self) -> PeerFailed:
        """It as an error of another rank."""
        return PeerFailed(self.rank, self.step, self.elapsed, self.error)


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank is doing: its steps, the outermost first (each with the number of those of that name), its meeting,
    its line of the script. Times are unix time. `calls` says that it makes torch's call, and does not wait before it.

    `failed` are the steps that it has left by an exception and not begun anew; `lost` says that it has met nobody since
    it left one. `counts` says how often it has come to the meetings of each group. `process` is that of `process_id`.
    """

    steps: tuple[tuple[str, int], ...] = ()
    since: float = 0.0
    meeting: Waits | None = None
    calls: bool = False
    failed: tuple[Failed, ...] = ()
    lost: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    line: str = ""
    beat: int = 0
    over: bool = False
    off: bool = False
    process: dict[str, Any] = field(default_factory=dict)

    @property
    def ends(self) -> bool:
        """Whether its script ends with an error."""
        return any(one.for_good for one in self.failed)

    @property
    def step(self) -> str:
        """The innermost of its steps, empty outside of any."""
        return self.steps[-1][0] if self.steps else ""

    def but(self, **changed: Any) -> Status:
        """The same with other values."""
        return replace(self, **changed)

    def came(self, waits: Waits) -> bool:
        """Whether the rank has come to this meeting, as far as it has said."""
        count, here = self.counts.get(waits.group, 0), self.meeting
        other = here is not None and here.key == waits.key and here.words != waits.words
        return count > waits.number or (count == waits.number and not other)


def failure_of(rank: int, was: Status, error: BaseException | str) -> Failed:
    """The failure of the step that a rank was in."""
    left = was.steps[-1] if was.steps else ("", 0)
    if isinstance(error, PeerFailed):
        return Failed(left, error.rank, error.step, error.elapsed, error.error)
    said = describe(error) if isinstance(error, BaseException) else error
    return Failed(left, rank, left[0], time.time() - was.since, said)


def failed_from(data: dict[str, Any]) -> Failed:
    """A failure from its data."""
    name, turn = data["left"]
    return Failed(**{**data, "left": (name, turn)})


def packed(status: Status) -> str:
    """A status as the store keeps it."""
    return json.dumps(asdict(status))


def unpacked(text: bytes) -> Status:
    """A status from the store."""
    said: dict[str, Any] = json.loads(text)
    meeting = said["meeting"]
    said["steps"] = tuple((name, turn) for name, turn in said["steps"])
    if meeting:
        ranks = {name: tuple(meeting[name]) for name in ("members", "needs", "made")}
        said["meeting"] = Waits(**{**meeting, **ranks})
    said["failed"] = tuple(failed_from(one) for one in said["failed"])
    return Status(**said)
