"""A function that is called some time after torch's compiler was at work in training, and never in between."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

DELAY = 30.0
"""Seconds without a compile after which the function is called, so that a series of compiles is one call."""


def call_after_compiles(function: Callable[[], None]) -> None:
    """Call `function` on a thread of its own when this process has compiled something, as long as it lives.

    It costs nothing until then. A process that ends before the delay is over calls it as it ends.
    """
    # The documented way to hear of compiles; there is none that lies outside of torch's private modules.
    from torch._dynamo.callback import callback_handler

    waiting: list[threading.Timer] = []

    def compiled(_: Any) -> None:
        for timer in waiting:
            timer.cancel()
        timer = threading.Timer(DELAY, function)
        timer.daemon = True
        waiting[:] = [timer]
        timer.start()

    def ends() -> None:
        if any(timer.is_alive() for timer in waiting):
            function()

    callback_handler.register_end_callback(compiled)
    atexit.register(ends)
