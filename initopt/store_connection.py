"""A connection of our own to the job's store: one does one thing at a time, and the script's may be waiting."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

CONNECT = 30.0
"""Seconds that a store may take to make a connection."""


def own_connection(store: Any, within: float | None = None) -> Any:
    """Return a further connection to a torch.distributed store. Takes at most `within` seconds (default: CONNECT).

    Raises TimeoutError, or what the store raises where it can't be had.
    """
    # A server that is gone is tried for as long as the store's timeout, which may be half an hour: that is left to a
    # thread which ends with the process.
    made: Future[Any] = Future()
    seconds = CONNECT if within is None else within

    def connect() -> None:
        try:
            made.set_result(store.clone())
        except Exception as error:
            made.set_exception(error)

    thread = threading.Thread(target=connect, name="initopt-connects", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no connection within {seconds:g} s: the process that serves the job's store may be gone")
    return made.result()
