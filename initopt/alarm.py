"""Interrupting a step that runs in the caller's own thread: its timeout, or a failure on another rank."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from initopt.failure import StepTimeout

PATIENCE = 2.0
"""Seconds that a step gets to answer the alarm of its own limit before it counts as stuck."""
INTERRUPTING = 10.0
"""Seconds that it gets to answer an interruption: it may be in the middle of a long call, with time left."""


class _Interruption(BaseException):
    """Carries an error out of a block past handlers that catch every Exception, to retry or to go on."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Alarm:
    """Raises an error in the thread that made it, from a timer or from another thread.

    It needs the main thread and an unused SIGALRM; elsewhere nothing is raised, since Python has no other way to
    interrupt a thread. Nor is a call interrupted that never returns to Python. `stuck` is called then, on another
    thread, with the step, its limit in seconds, and an event that is set if the block ends after all.
    """

    def __init__(self, stuck: Callable[[str, float, threading.Event], None]) -> None:
        self._stuck = stuck
        self._thread = threading.current_thread()
        self._usable = (
            self._thread is threading.main_thread()
            and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
            and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        )
        self._error: BaseException | None = None
        self._block: tuple[str, float, threading.Event] | None = None
        self._armed = False
        self._lock = threading.Lock()

    @contextmanager
    def limit(self, step: str, seconds: float) -> Iterator[None]:
        """Raise StepTimeout inside the block once it has run for `seconds`, at once what `interrupt` gave before."""
        ended = threading.Event()
        self._block = (step, seconds, ended)
        timer = threading.Timer(min(seconds + PATIENCE, threading.TIMEOUT_MAX), self._stuck, self._block)
        timer.daemon = True
        timer.start()
        try:
            with self._ringing(step, seconds):
                yield
        finally:
            ended.set()
            timer.cancel()
            timer.join()

    @contextmanager
    def _ringing(self, step: str, seconds: float) -> Iterator[None]:
        if not self._usable:
            yield
            return

        def ring(_signal: int, _frame: FrameType | None) -> None:
            if self._armed:
                self._armed = False
                raise _Interruption(self._error or StepTimeout(step, seconds))

        signal.signal(signal.SIGALRM, ring)
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            try:
                if self._error is not None:
                    raise self._error
                yield
            except _Interruption as interruption:
                raise interruption.error.with_traceback(interruption.__traceback__) from None
            finally:
                self._armed = False
        finally:
            # With the lock, since without a handler the signal of `interrupt` ends the process.
            with self._lock:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def interrupt(self, error: BaseException) -> None:
        """Raise `error` in the block of `limit` that is running, else in the next one. A block may turn out stuck."""
        self._error = error
        block = self._block
        if not self._armed or block is None or self._thread.ident is None:
            return
        ended = block[2]
        until = time.monotonic() + INTERRUPTING
        # Again and again: a signal that comes just before a thread goes to sleep on a lock does not wake it.
        while time.monotonic() < until and not ended.is_set():
            with self._lock:
                heard = not self._armed
                if not heard:
                    signal.pthread_kill(self._thread.ident, signal.SIGALRM)
            if heard and not ended.wait(PATIENCE):
                # Somebody in the block has caught it and goes on.
                with self._lock:
                    self._armed = not ended.is_set()
            time.sleep(0.02)
        if not ended.is_set():
            self._stuck(*block)
