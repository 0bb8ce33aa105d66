"""What a pass says of meetings: a verdict, the proof that a person can follow, and what would be saved.

A finding is about calls as they were recorded. What would be saved is re-simulated, never read off a span: a wait that
is no longer spent here turns up at the next meeting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from initopt.comm_elim.timeline import Met
from initopt.record import Span

Verdict = Literal["drop", "reuse", "fuse", "local", "keep"]
"""`drop`: nothing is lost without it; `reuse`: what it gives was there before; `fuse`: it can go with its neighbour;
`local`: each rank can tell the value from what it holds; `keep`: it stays."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What can be done about `meetings`, and why.

    `calls` are those that go away, of all ranks; of a finding that keeps its meetings there are none. `about` are the
    calls that it speaks of, where these are not all of its meetings. `reason` is the
    verdict's reason in a line, `proof` the argument in sentences. `rewrite` is the switch of the rewrite that does it;
    where it is empty, `unapplied` says why there is none. Where `agreed`, ranks check with each other what was assumed
    (the Agreement), so that of all such meetings one remains. `saving` is an estimate in seconds, alone and with
    that check.
    """

    name: str
    verdict: Verdict
    meetings: tuple[Met, ...]
    calls: tuple[Span, ...] = ()
    reason: str = ""
    proof: tuple[str, ...] = ()
    rewrite: str = ""
    unapplied: str = ""
    agreed: bool = False
    about: tuple[Span, ...] = ()
    saving: float = field(default=0.0, compare=False)

    def took(self, rank: int) -> float:
        """Seconds that the meetings took together on a rank, waits included. 0.0 on one that was in none."""
        return sum(span.end - span.start for span in self._spans() if span.rank == rank)

    def wait(self, rank: int) -> float:
        """Seconds of `took` that were spent for slower ranks."""
        return sum(span.wait for span in self._spans() if span.rank == rank)

    @property
    def call_sites(self) -> tuple[str, ...]:
        """Where the meetings were called from, as `file:line`, each once."""
        return tuple(dict.fromkeys(met.site for met in self.meetings if met.site))

    def _spans(self) -> tuple[Span, ...]:
        return self.about or calls_in(self.meetings)


def kept(name: str, meetings: Iterable[Met], reason: str, *proof: str) -> Finding:
    """A finding that leaves its meetings as they are."""
    return Finding(name, "keep", tuple(meetings), reason=reason, proof=proof)


def calls_in(meetings: Iterable[Met]) -> tuple[Span, ...]:
    """All calls of these meetings."""
    return tuple(span for met in meetings for span in met.spans)


def at(met: Met) -> str:
    """A meeting in words: its operation and where it was called from."""
    return f"{met.call.op} ({met.site or 'no call site'})"
