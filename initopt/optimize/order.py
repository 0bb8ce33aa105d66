"""`order`: ranks whose meetings differ are stopped at the first that does, where torch would wait or mix up values.

Only what can't go well is stopped: a new group that ranks ask for with other members or another backend, and all ranks
waiting at once, in calls that need all of them, on different groups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from initopt.hooks import Meeting
from initopt.optimize.statuses import Status, Waits
from initopt.rank_numbers import ranks_in_short

if TYPE_CHECKING:
    from initopt.agreement import Disagreement

NAME = "order"

_TOLD = "differs"


def words(meeting: Meeting) -> str:
    """A call in words, the same on all ranks that make the same one."""
    if meeting.op == "new_group":
        backend = meeting.options.partition(",")[0]
        return f"{meeting.op} for ranks {ranks_in_short(meeting.ranks)}, backend {backend}"
    root = f" from rank {meeting.root}" if meeting.root >= 0 else ""
    return f"{meeting.op}{root} on group {meeting.group}"


def same_group(store: Any, waits: Waits, rank: int) -> Disagreement | None:
    """The error to raise if the first rank that made this group asked for another one, which is told to all."""
    mine = [waits.words, waits.place, rank]
    first = json.loads(store.compare_set(f"asked/{waits.key}", "", json.dumps(mine)))
    if first[0] == mine[0]:
        return None
    found = sorted((first, mine), key=lambda one: int(one[2]))
    return _tell(
        store,
        f"new group {waits.number} of the job",
        [[one[2]] for one in found],
        [f"{one[0]} at {one[1]}" for one in found],
    )


def crossed(store: Any, statuses: Sequence[Status]) -> Disagreement | None:
    """The error to raise where all ranks wait, surely for ever, in calls that are not the same."""
    meetings = [None if status.calls else status.meeting for status in statuses]
    parties: dict[str, list[int]] = {}
    for rank, one in enumerate(meetings):
        if one is None or not one.large:
            return None
        parties.setdefault(f"{one.words} at {one.place}", []).append(rank)
    if len({one.group for one in meetings if one is not None}) == 1:
        return None
    number = min(one.large for one in meetings if one is not None)
    return _tell(store, f"meeting {number} of all ranks", list(parties.values()), list(parties))


def told(store: Any) -> Disagreement | None:
    """What another rank has found."""
    return _error(json.loads(store.get(_TOLD))) if store.check([_TOLD]) else None


def _tell(store: Any, place: str, ranks: list[list[int]], texts: list[str]) -> Disagreement:
    return _error(json.loads(store.compare_set(_TOLD, "", json.dumps([place, ranks, texts]))))


def _error(found: list[Any]) -> Disagreement:
    # It imports torch, and this file is there before.
    from initopt.agreement import Difference, Disagreement

    place, ranks, texts = found
    return Disagreement([Difference(place, tuple(tuple(party) for party in ranks), tuple(texts))])
