"""The thresholds of Python's garbage collector, set for a while, unless the program sets them itself meanwhile.

Who asks for them meanwhile is told those of before: what a module keeps, or sets as a multiple of them, is its own.

Most of what a module makes as it is imported stays, and each collection of old objects walks through all of it again.
"""

from __future__ import annotations

import gc

WHILE_IMPORTING = 500_000
"""New objects at which garbage is collected while modules are imported. Python's own threshold is 700 or 2,000."""


_NAME = "get_threshold"
_now = gc.get_threshold


class Thresholds:
    """Those of this process, as they are now in `before`."""

    def __init__(self) -> None:
        self.before = _now()
        self._ours = self.before

    def set(self, *thresholds: int) -> bool:
        """Set them. Does nothing, and is False, where somebody else has set them since."""
        ours = _now() == self._ours
        if ours:
            gc.set_threshold(*thresholds)
            self._ours = _now()
        hide = ours and self._ours != self.before
        if hide and gc.get_threshold is _now:
            vars(gc)[_NAME] = self._told
        elif not hide and gc.get_threshold == self._told:
            vars(gc)[_NAME] = _now
        return ours

    def give_back(self) -> bool:
        """Set them as they were before. False as above."""
        return self.set(*self.before)

    def _told(self) -> tuple[int, int, int]:
        """Return the current collection thresholds."""
        now = _now()
        return self.before if now == self._ours else now
