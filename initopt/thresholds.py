"""The thresholds of Python's garbage collector, set for a while, unless the program sets them itself meanwhile.

Most of what a module makes as it is imported stays, and each collection of old objects walks through all of it again.
"""

from __future__ import annotations

import gc

WHILE_IMPORTING = 500_000
"""New objects at which garbage is collected while modules are imported. Python's own threshold is 700 or 2,000."""


class Thresholds:
    """Those of this process, as they are now in `before`."""

    def __init__(self) -> None:
        self.before = gc.get_threshold()
        self._ours = self.before

    def set(self, *thresholds: int) -> bool:
        """Set them. Does nothing, and is False, where somebody else has set them since."""
        if gc.get_threshold() != self._ours:
            return False
        gc.set_threshold(*thresholds)
        self._ours = gc.get_threshold()
        return True

    def give_back(self) -> bool:
        """Set them as they were before. False as above."""
        return self.set(*self.before)
