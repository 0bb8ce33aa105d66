"""Meetings that were left out, as a record has them: how many by which rewrite, and why that may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from initopt.runs import Run

WHY: Mapping[str, str] = {
    "validation_flag": "one environment variable, which every rank has",
    "plan": "every rank can make it from the same inputs",
    "groups": "nobody needs them: ranks that are no members, and a barrier before the first meeting on a group",
    "ec_metadata": "stands in the sharding plan, which every rank has",
    "mc_metadata": "follows from the sharding plan, which every rank has",
    "dp_tables": "several broadcasts of tables become one, and what is replaced right after is not sent",
    "ddp_sync": "what is checked or sent is equal on all ranks",
}
"""Why each rewrite may leave out what it leaves out, in a line."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """So many meetings (`count`) that the rewrite `name` has left out, of what was made at `place` (`file:line`)."""

    name: str
    count: int
    reason: str
    place: str


def told(counts: Mapping[str, int]) -> str:
    """The sentence for so many meetings by rewrite; empty if there are none.

    >>> told({"plan": 1, "ddp_sync": 2})
    '3 meetings of ranks were left out (1 by plan, 2 by ddp_sync)'
    >>> told({"plan": 1})
    '1 meeting of ranks was left out (1 by plan)'
    """
    if not counts:
        return ""
    whole = sum(counts.values())
    many = "1 meeting of ranks was" if whole == 1 else f"{whole} meetings of ranks were"
    return f"{many} left out ({', '.join(f'{count} by {name}' for name, count in counts.items())})"


def left_out(run: Run) -> tuple[LeftOut, ...]:
    """What the lowest rank that speaks of it left out, in its order: by `initopt.run --optimize` or in a `Startup`."""
    said = [(one.rank, one.place, one.left_out) for one in run.optimized if one.left_out]
    said += [(note.rank, note.step, note.left_out) for note in run.notes if note.left_out]
    first = min((rank for rank, _, _ in said), default=0)
    return tuple(
        LeftOut(name, count, WHY.get(name, ""), place)
        for rank, place, counts in said
        if rank == first
        for name, count in counts
    )
