"""`gc`: garbage is collected less often until the first training step, above all while modules are imported.

While the program imports, a collection waits for many more new objects. From its imports to its first training step
young objects are collected as ever, and old ones, all that was imported among them, are not walked through. Then the
collector is as it was. Garbage is found later; nothing else changes. Thresholds that the program sets itself stay.
"""

from __future__ import annotations

import gc
import os

from initopt.optimize.saying import Saying
from initopt.thresholds import WHILE_IMPORTING, Thresholds

NAME = "gc"

OLD = 1_000
"""Collections of the second generation until one of all generations may begin. Python's own threshold is 10."""

_active: Thresholds | None = None
_at_fork = False


class Garbage:
    """The collector of this process, from its start to its first training step."""

    def __init__(self, saying: Saying) -> None:
        self._saying = saying
        self._thresholds: Thresholds | None = None
        self._ran = 0

    def begin(self) -> None:
        """The process begins, and with it the imports."""
        global _active, _at_fork
        thresholds = Thresholds()
        young, middle, old = thresholds.before
        if not gc.isenabled() or not 0 < young <= WHILE_IMPORTING or old > OLD:
            state = "on" if gc.isenabled() else "off"
            self._saying.left(NAME, f"before the script began the collector was {state}, at {thresholds.before}")
            return
        self._ran = _runs()
        thresholds.set(WHILE_IMPORTING, middle, OLD)
        self._thresholds = _active = thresholds
        if not _at_fork:
            _at_fork = True
            os.register_at_fork(after_in_child=_give_back)

    def imports_ended(self) -> None:
        """The program goes on from its imports to something else."""
        if self._thresholds is None:
            return
        young, middle, _ = self._thresholds.before
        if not self._thresholds.set(young, middle, OLD):
            self._saying.left(NAME, f"the script has set the collector to {gc.get_threshold()}")
            return
        ran = f"{_runs() - self._ran} times during the imports, at {WHILE_IMPORTING:,} new objects each"
        self._saying.applied(NAME, f"garbage was collected {ran}", place="")

    def end(self) -> None:
        """Leave the collector as it was."""
        if self._thresholds is not None:
            self._thresholds.give_back()
            self._thresholds = None


def _runs() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def _give_back() -> None:
    """In a process that was forked meanwhile: it may live as long as the training."""
    if _active is not None:
        _active.give_back()
