"""A call that may never return, and is waited for only so long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def within(seconds: float, function: Callable[[], Result]) -> Result:
    """Return what `function` returns, or raise what it raises. Raises TimeoutError if it takes longer.

    It runs on a thread of its own, which is left to itself then: there is no way to stop a call of a file system.
    """
    done: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(function())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="initopt-within", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"there was no answer within {seconds:g} s")
    return done[0]  # type: ignore[no-any-return]
