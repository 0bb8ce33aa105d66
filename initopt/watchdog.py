"""Ending a process whose interpreter lock a step never lets go of.

No Python code runs then, no signal handler and no other thread. faulthandler keeps a thread in C that needs no lock: it
writes where every Python thread stands and ends the process, unless this process goes on to put it off.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time

MARGIN = 15.0
"""Seconds over a step's limit, in which every gentler way of ending it has had its turn."""

_STDERR = 2
_LONGEST = 1e9
"""Seconds; the system's timers take no more."""

_lock = threading.Lock()
_until: float | None = None
_forks_seen = False


def put_off(seconds: float) -> None:
    """End the process (exit code 1) in `seconds` and MARGIN from now, unless called again.

    Takes the one timer that faulthandler has.
    """
    global _until, _forks_seen
    with _lock:
        if not _forks_seen:
            _forks_seen = True
            os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
        _until = time.monotonic() + min(seconds + MARGIN, _LONGEST)
        _arm(_until)


def stop() -> None:
    """End the process no more."""
    global _until
    with _lock:
        _until = None
        faulthandler.cancel_dump_traceback_later()


def _arm(until: float) -> None:
    faulthandler.dump_traceback_later(max(until - time.monotonic(), 0.001), exit=True, file=_STDERR)


# In a child the thread would be gone and its lock held: the child's own use of faulthandler would wait for ever.


def _before_fork() -> None:
    _lock.acquire()
    if _until is not None:
        faulthandler.cancel_dump_traceback_later()


def _after_fork() -> None:
    if _until is not None:
        _arm(_until)
    _lock.release()


def _in_child() -> None:
    global _until
    _until = None
    _lock.release()
