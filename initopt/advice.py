"""What a script could do itself to start sooner: the line to change, and what that saves by simulation.

It puts together what others have found: what the first batch did not need (`deferral`), meetings that ranks could do
without and that no rewrite leaves out (`comm_elim`), and what only the script can prove (`record.Advised`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from initopt.chain import finished_ranks
from initopt.deferral import findings
from initopt.planned import saving

if TYPE_CHECKING:
    from initopt.runs import Run

_LIBRARIES = ("torch/", "torchrec/", "fbgemm_gpu/", "initopt/")
_WORTH = 0.001
"""Seconds that a meeting must save to be spoken of."""


@dataclass(frozen=True, slots=True)
class Tip:
    """`place` is the `file:line` to change, `saves` simulated seconds, None where they are not known."""

    place: str
    text: str
    saves: float | None


def advice(run: Run) -> tuple[Tip, ...]:
    """All that is known, the largest saving first. Empty for a start-up that never reached its first batch."""
    if not finished_ranks(run):
        return ()
    tips = [*_own(run), *_deferred(run), *_meetings(run)]
    return tuple(sorted(tips, key=lambda tip: (-(tip.saves or 0.0), tip.place, tip.text)))


def _own(run: Run) -> list[Tip]:
    found: defaultdict[tuple[str, str], dict[int, dict[str, float]]] = defaultdict(dict)
    for one in run.advised:
        found[one.place, one.text][one.rank] = dict(one.steps)
    nothing: dict[str, float] = {}
    tips = []
    for (place, text), less in found.items():
        known = any(less.values())
        saves = saving(run, {rank: less.get(rank, nothing) for rank in finished_ranks(run)}) if known else None
        tips.append(Tip(place, text, saves))
    return tips


def _deferred(run: Run) -> list[Tip]:
    return [
        Tip(one.place, f"{one.what}: not needed for the first batch (initopt defer)", one.saves)
        for one in findings(run)
        if one.worth_saying
    ]


def _meetings(run: Run) -> list[Tip]:
    # It brings the graph algorithms with it.
    from initopt.comm_elim.passes import find

    tips = []
    for one in find(run).findings:
        place = one.call_sites[0] if one.call_sites else ""
        own = place and not place.startswith(_LIBRARIES)
        if one.verdict != "keep" and own and not one.rewrite and one.saving >= _WORTH:
            text = f"{one.name}: {one.reason} (initopt collectives --why {one.name})"
            tips.append(Tip(place, text, one.saving))
    return tips
