"""How the ranks of a run have ended, read while it may still be going on, and which of them failed first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from initopt.rank_numbers import ranks_in_short
from initopt.record import Ended, Header, Trailer

_TAIL = 1 << 14
"""Bytes at the end of a file in which its last line is looked for."""

_AT_ONCE = 0.02
"""Seconds. What is not in a step is seen to end a script this much later, as exit handlers run."""


@dataclass(frozen=True, slots=True)
class End:
    """How a rank's record ended: `ended` is what has ended its script, None where it came to its end, or is not known.

    `at` is unix time in seconds, on the `clock` of a header.
    """

    rank: int
    clock: str
    at: float
    ended: Ended | None


def ends(path: Path) -> tuple[End, ...]:
    """The ends of the ranks of a run that may still be going on: of those whose record in `path` has its last line."""
    import msgspec

    found = []
    for file in sorted(path.glob("rank*.jsonl")):
        with file.open("rb") as lines:
            first = lines.readline()
            lines.seek(max(len(first), lines.seek(0, 2) - _TAIL))
            last = lines.read().splitlines(keepends=True)
        if not last or b'"kind":"trailer"' not in last[-1] or not last[-1].endswith(b"\n"):
            continue
        found.append(end_of(msgspec.json.decode(first, type=Header), msgspec.json.decode(last[-1], type=Trailer)))
    return tuple(found)


def end_of(header: Header, trailer: Trailer) -> End:
    """How the rank of these ended."""
    at = trailer.ended.at if trailer.ended is not None else trailer.end
    return End(header.rank, clock_of(header), header.process_start + at, trailer.ended)


def first_to_fail(ends: Iterable[End]) -> End | None:
    """The one that something ended first. None where there is none, or others were ended at about the same time.

    Who was interrupted (Ctrl-C) has not failed, and who ends after that mostly ends of it.
    """
    failed = sorted((end for end in ends if end.ended is not None), key=lambda end: end.at)
    alike = [end for end in failed[1:] if end.clock != failed[0].clock or end.at < failed[0].at + _AT_ONCE]
    return failed[0] if failed and not alike and not _interrupted(failed[0]) else None


def who_failed(ends: Sequence[End], world_size: int) -> Iterator[str]:
    """What rank 0 can say of the others when its own script ends, in one or two sentences; mostly nothing."""
    own = next((end.ended for end in ends if end.rank == 0), None)
    first = first_to_fail(ends)
    silent = sorted(set(range(world_size)) - {end.rank for end in ends})
    others = [end for end in ends if end.rank and end.ended is not None and not _interrupted(end)]
    if others and (first is None or first.rank):
        named = first or min(others, key=lambda end: end.at)
        when = "" if own is None else " before rank 0" if first is not None else ", too"
        if first is not None and not silent:
            when = " first"
        assert named.ended is not None
        in_step = f" (in step {named.ended.step!r})" if named.ended.step else ""
        yield f"rank {named.rank} failed{when}: {named.ended.error}{in_step}"
    if silent and (own is not None or others):
        yield f"not known yet: how rank{'s' if len(silent) > 1 else ''} {ranks_in_short(silent)} ended"


def _interrupted(end: End) -> bool:
    return end.ended is not None and end.ended.error.startswith("KeyboardInterrupt")


def clock_of(header: Header) -> str:
    """Names the clock that a rank reads."""
    return header.clock or header.host
