"""`gc`: garbage is collected less often until the first training step, above all while modules are imported.

While the main thread imports libraries, a collection waits for many more new objects; what was imported then counts as
old, so that no collection of young objects walks through it. Not while the trainer's own modules run: what they drop
may be large. From the imports to the first training step a collection of old objects waits longer. Then the collector
is as it was. Garbage is found later; nothing else changes. Thresholds that the program sets itself stay.
"""

from __future__ import annotations

import gc
import os

from initopt.optimize.saying import Saying
from initopt.thresholds import WHILE_IMPORTING, Thresholds

NAME = "gc"

OLD = 100
"""Collections of the second generation until one of all generations may begin. Python's own threshold is 10."""

FROZEN = 10_000
"""Python 3.12 itself has some objects frozen as it begins. More than this were frozen by the script, and stay so."""

_active: Thresholds | None = None
_at_fork = False


class Garbage:
    """The collector of this process, from its start to its first training step."""

    def __init__(self, saying: Saying) -> None:
        self._saying = saying
        self._thresholds = Thresholds()
        self._imports = False
        self._on = self._may()

    def outermost_import(self, begins: bool) -> None:
        """The main thread begins to import what is not the trainer's own, or has ended that."""
        if not self._on:
            return
        if begins:
            self._imports = True
            # What the script has dropped is not to wait for a collection of old objects.
            gc.collect(1)
            self._set(WHILE_IMPORTING, *self._thresholds.before[1:])
            return
        self._set(*self._thresholds.before)
        if self._on and gc.get_freeze_count() <= FROZEN:
            # Moves all objects to the oldest generation, without a look at them.
            gc.freeze()
            gc.unfreeze()

    def imports_ended(self) -> None:
        """The program goes on from its imports to something else."""
        if self._on:
            young, middle, _ = self._thresholds.before
            self._set(young, middle, OLD)
            if not gc.isenabled():
                self._saying.left(NAME, "the script has switched the collector off")
            elif self._on:
                text = f"garbage was collected at {WHILE_IMPORTING:,} new objects during the imports, not at {young:,}"
                later = "old objects wait longer for a collection until the first training step has ended"
                self._saying.applied(NAME, text if self._imports else later, place="")
            self._on = False

    def end(self) -> None:
        """Leave the collector as it was."""
        self._thresholds.give_back()
        self._on = False

    def _set(self, *thresholds: int) -> None:
        global _active, _at_fork
        self._on = self._thresholds.set(*thresholds)
        if not self._on:
            self._saying.left(NAME, f"the script has set the collector's thresholds to {gc.get_threshold()}")
            return
        _active = self._thresholds
        if not _at_fork:
            _at_fork = True
            os.register_at_fork(after_in_child=_give_back)

    def _may(self) -> bool:
        young, _, old = self._thresholds.before
        if gc.isenabled() and 0 < young <= WHILE_IMPORTING and old <= OLD:
            return True
        state = "on" if gc.isenabled() else "off"
        self._saying.left(NAME, f"before the script began the collector was {state}, at {self._thresholds.before}")
        return False


def _give_back() -> None:
    """In a process that was forked meanwhile: it may live as long as the training."""
    if _active is not None:
        _active.give_back()
