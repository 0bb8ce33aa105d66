"""Tells which of the things that a trainer does is its first training step: the first optimizer step on real data.

A step counts if a backward pass came before it: a validation has none, and neither has a step that only makes the
optimizer's state. It has ended with the last optimizer that steps before the next batch or backward pass, or, inside of
a train pipeline's `progress`, with that. If what it trained is loaded from a checkpoint before anything else is
trained, it was thrown away, and the next one counts. So a step is known to be the first only when the second begins.

Optimizers may step unseen: in the backward pass, or in compiled code. After many backward passes and no step it was so.
"""

from __future__ import annotations

from dataclasses import dataclass

from initopt.own_lines import Moment


@dataclass(frozen=True, slots=True)
class Trained:
    """A training step, from where to where."""

    start: Moment
    end: Moment


_UNSEEN = 32
"""Backward passes without an optimizer's step, more than anybody accumulates gradients over at a start."""


class FirstStep:
    """Told what the trainer does, in order, on one thread."""

    def __init__(self) -> None:
        self.found: Trained | None = None
        """The step that was taken, until it is known to count."""
        self.all_in_backward = False
        """Whether every parameter is stepped while its gradient is made, so that no optimizer steps afterwards."""
        self._batch: Moment | None = None
        self._start: Moment | None = None
        self._progress: Moment | None = None
        self._depth = 0
        self._backwards: list[Moment] = []
        self._thrown_away = False

    def batch_came(self, at: Moment) -> None:
        """A loader, or a pipeline that only loads, gave a batch."""
        self._batch = at

    def step_ended(self, at: Moment) -> None:
        """Something that is no training step has ended: what is trained after it began no earlier."""
        if self._batch is not None:
            self._batch = at

    def backward_begins(self, at: Moment) -> None:
        """A backward pass begins."""
        if self._start is None:
            self._start = self._batch or at

    def backward_ended(self, at: Moment) -> None:
        """It has ended."""
        if self._depth:
            return
        self._backwards.append(at)
        if self.all_in_backward or self.found is not None:
            self._ends(at)
        elif len(self._backwards) == _UNSEEN:
            self._ends(self._backwards[0])

    def stepped(self, at: Moment) -> None:
        """An optimizer has stepped."""
        if self._depth == 0 and self._start is not None:
            self._ends(at)

    def progress_begins(self, at: Moment) -> None:
        """A train pipeline's `progress` begins, perhaps inside another one's."""
        if self._depth == 0:
            self._progress = at
        self._depth += 1

    def progress_ended(self, at: Moment, *, well: bool) -> None:
        """It has ended, by returning or (not `well`) by raising."""
        self._depth -= 1
        if self._depth or not well:
            return
        if self._start is None:
            self.batch_came(at)
        else:
            self._start = self._progress
            self._ends(at)

    def thrown_away(self) -> Trained | None:
        """What was trained is loaded anew: the step that doesn't count. Only once, since some load at every step."""
        found = self.found
        if found is None or self._thrown_away:
            return None
        self._thrown_away = True
        self.found = self._start = self._batch = None
        return found

    def _ends(self, at: Moment) -> None:
        assert self._start is not None
        self.found = Trained(self._start, at)
