"""A board of notes in the job's key-value store, where ranks that start up leave word for each other.

Nothing here waits inside the store: a connection does one thing at a time, and what is waited for may never come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from initopt.failure import first_line
from initopt.peers import attempt_of_job
from initopt.store_connection import own_connection

POLL = 0.25
"""Seconds between two looks at the board of a rank that waits."""
LINE = 10.0
"""Seconds after which ranks that wait say, and go on saying, for whom."""


class StoreGone(Exception):
    """The job's store does not answer. The text is that of its error."""


class Board:
    """The notes of one topic, which is used once in an attempt of the job.

    `store` is a torch.distributed store that all ranks share; a connection of its own is cloned from it. One thread at
    a time uses a board. All methods raise StoreGone.
    """

    def __init__(self, store: Any, topic: str) -> None:
        with _answering():
            from torch.distributed import PrefixStore

            self._store = PrefixStore(f"initopt/{attempt_of_job()}/{topic}", own_connection(store))
        self._begun = time.monotonic()
        self._lines = 0

    def write(self, key: str, text: str) -> None:
        """Write a note over what may be there."""
        with _answering():
            self._store.set(key, text)

    def claim(self, key: str, text: str) -> str:
        """Write a note where there is none; return the one that is there now."""
        with _answering():
            return str(self._store.compare_set(key, "", text).decode())

    def read(self, key: str) -> str | None:
        """Return a note, None if there is none."""
        with _answering():
            return str(self._store.get(key).decode()) if self._store.check([key]) else None

    def has(self, key: str) -> bool:
        """Say whether there is such a note."""
        with _answering():
            return bool(self._store.check([key]))

    def add(self, key: str, number: int) -> int:
        """Add to the number that stands there (none: 0) and return the sum."""
        with _answering():
            return int(self._store.add(key, number))

    def line_is_due(self) -> bool:
        """Say whether this rank is to print a progress line: every LINE seconds the first rank that asks."""
        turn = int((time.monotonic() - self._begun) / LINE)
        if turn == self._lines:
            return False
        self._lines = turn
        return self.add(f"line/{turn}", 1) == 1


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise StoreGone(first_line(error)) from error
