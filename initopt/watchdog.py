"""Ending a process whose interpreter lock a step never lets go of.

No Python code runs then, no signal handler and no other thread. faulthandler keeps a thread in C that needs no lock: it
writes where every Python thread stands and ends the process, unless this process goes on to put it off.
"""

from __future__ import annotations

import faulthandler

MARGIN = 15.0
"""Seconds over a step's limit, in which every gentler way of ending it has had its turn."""

_STDERR = 2
_LONGEST = 1e9
"""Seconds; the system's timers take no more."""


def put_off(seconds: float) -> None:
    """End the process (exit code 1) in `seconds` and MARGIN from now, unless called again.

    Takes the one timer that faulthandler has.
    """
    faulthandler.dump_traceback_later(min(seconds + MARGIN, _LONGEST), exit=True, file=_STDERR)


def stop() -> None:
    """End the process no more."""
    faulthandler.cancel_dump_traceback_later()
