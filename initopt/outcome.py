"""How a start-up went on this rank: what failed here, what was heard of others, and the one error made of both."""

from __future__ import annotations

from collections.abc import Mapping

from initopt.failure import PeerFailed, StartupFailed, as_exception, note
from initopt.peers import Failure, describe


class Outcome:
    """Collects what goes wrong in the start-up `startup` on `rank`.

    `errors` are those of this rank's own steps, `own` the first of them as the others are told it, `heard` another
    rank's failure. `was_running` are the steps that ran when the start-up was stopped, with their seconds.
    """

    def __init__(self, startup: str, rank: int) -> None:
        self.startup = startup
        self.rank = rank
        self.errors: list[BaseException] = []
        self.own: Failure | None = None
        self.heard: Failure | None = None
        self.was_running: Mapping[str, float] = {}

    @property
    def bad(self) -> bool:
        """Whether anything went wrong, here or elsewhere."""
        return bool(self.errors) or self.heard is not None

    @property
    def first(self) -> Failure | None:
        """What the start-up failed of: another rank's failure before one of this rank's."""
        return self.heard or self.own

    def keep(self, step: str, error: BaseException, elapsed: float) -> None:
        """Add the error of a step that ran for `elapsed` seconds."""
        note(error, f"start-up step {step!r} failed on rank {self.rank} after {elapsed:.1f} s")
        self.errors.append(error)

    def fails(self, step: str, error: BaseException, elapsed: float) -> None:
        """Add the error that this rank's start-up fails of."""
        self.keep(step, error, elapsed)
        self.own = Failure(self.rank, step, elapsed, describe(error))

    def was_an_echo(self, first: Failure) -> None:
        """Learn that `first`, on another rank, came before this rank's own failure."""
        self.heard = first
        if self.own is not None and self.own.step:
            self.was_running = {self.own.step: self.own.elapsed, **self.was_running}

    def note_what_ran(self, error: BaseException) -> None:
        """Say under `error` in which steps this rank was."""
        for step, seconds in self.was_running.items():
            note(error, f"rank {self.rank} was in start-up step {step!r} for {seconds:.1f} s")

    def error(self, meanwhile: str) -> BaseException:
        """The error to raise: all of them in a StartupFailed, or the Ctrl-C that was among them.

        `meanwhile` says what the ranks were doing that did not fail.
        """
        errors = list(self.errors)
        if self.heard is not None:
            peer = peer_error(self.heard)
            self.note_what_ran(peer)
            errors.insert(0, peer)
        if meanwhile:
            note(errors[0], f"meanwhile {meanwhile}")
        for error in errors:
            if isinstance(error, KeyboardInterrupt):
                return error
        first = self.first
        at = f"in step {first.step!r} " if first and first.step else ""
        text = f"start-up {self.startup!r} failed {at}on rank {first.rank if first else self.rank}"
        return StartupFailed(text, [as_exception(error) for error in errors])


def peer_error(failure: Failure) -> PeerFailed:
    """Another rank's failure as an error of this rank."""
    return PeerFailed(failure.rank, failure.step, failure.elapsed, failure.error)
