"""What watching costs: the CPU seconds of a thread in a block, without the garbage that happens to be collected there.

A collection goes through all that the process has, which is mostly the libraries'. It comes sooner or later anyway.
"""

from __future__ import annotations

import gc
import threading
import time
from contextlib import suppress


class Spent:
    """`with Spent() as spent:` and then `spent.seconds`, in CPU seconds of this thread since `entered`."""

    def __init__(self, entered: float | None = None) -> None:
        """`entered` is a reading of `time.thread_time`; by default the block's begin."""
        self.seconds = 0.0
        self._entered = time.thread_time() if entered is None else entered
        self._thread = threading.get_ident()
        self._began = self._collecting = 0.0

    def __enter__(self) -> Spent:
        gc.callbacks.append(self._collects)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):  # somebody has emptied the list
            gc.callbacks.remove(self._collects)
        self.seconds = time.thread_time() - self._entered - self._collecting

    def _collects(self, phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._began = time.thread_time()
        else:
            self._collecting += time.thread_time() - self._began
