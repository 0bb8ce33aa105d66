"""How a start-up fails: what `Startup.run` raises, and the notes that say step, rank and elapsed time."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

if sys.version_info >= (3, 11):
    from builtins import ExceptionGroup
else:  # pragma: no cover
    from exceptiongroup import ExceptionGroup


class StartupFailed(ExceptionGroup[Exception]):
    """A start-up did not reach its end. Holds the errors of this rank's steps and what was heard of other ranks.

    Every rank of the job raises it, whichever rank failed first.
    """

    def derive(self, excs: Sequence[Exception]) -> StartupFailed:  # type: ignore[override]
        """Keep the type when a handler splits the group."""
        return StartupFailed(self.message, excs)


class PeerFailed(RuntimeError):
    """Another rank failed, or is gone. `rank`, `step` and `elapsed` (seconds) are that rank's; `step` may be empty."""

    def __init__(self, rank: int, step: str, elapsed: float, error: str) -> None:
        # Outside of a step no time is known that means anything.
        where = f" in start-up step {step!r} after {elapsed:.1f} s" if step else ""
        super().__init__(f"rank {rank} failed{where}: {error}")
        self.rank = rank
        self.step = step
        self.elapsed = elapsed
        self.error = error

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.step, self.elapsed, self.error)


class StepTimeout(TimeoutError):
    """A step ran longer than its limit of `limit` seconds."""

    def __init__(self, step: str, limit: float) -> None:
        super().__init__(
            f"start-up step {step!r} did not return within {limit:g} s "
            "(its timeout; give the step or the Startup a longer one if it needs more)"
        )
        self.step = step
        self.limit = limit

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.step, self.limit)


def as_exception(error: BaseException) -> Exception:
    """Return an error as one that `except Exception` catches: a step that calls `sys.exit` ends the start-up only."""
    if isinstance(error, Exception):
        return error
    stand_in = RuntimeError(f"{type(error).__name__}: {error}")
    stand_in.__cause__ = error
    for text in getattr(error, "__notes__", []):
        note(stand_in, text)
    return stand_in


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of what it says."""
    return f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"


def note(error: BaseException, text: str) -> None:
    """Add a note that tracebacks show under the error."""
    # BaseException.add_note exists from Python 3.11 on; this is what it does.
    notes = list(getattr(error, "__notes__", []))
    error.__notes__ = [*notes, text]  # type: ignore[attr-defined]


def doing(statuses: Mapping[int, tuple[str, float]], *, but: Collection[int]) -> str:
    """Say what the ranks other than `but` are doing, the ones in the same step together."""
    by_step: dict[str, list[tuple[int, float]]] = {}
    for rank, (step, seconds) in sorted(statuses.items()):
        if rank not in but:
            by_step.setdefault(step, []).append((rank, seconds))
    parts = []
    for step, ranks in by_step.items():
        who = "rank" if len(ranks) == 1 else "ranks"
        names = ", ".join(str(rank) for rank, _ in ranks[:8]) + (
            f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        )
        what = f"in {step!r} for {max(s for _, s in ranks):.1f} s" if step else "between steps"
        parts.append(f"{who} {names} {'finished' if step == 'ended' else what}")
    return "; ".join(parts)
