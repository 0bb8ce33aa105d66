"""This process and everything that it started: who is there, and the CPU time that all of them have used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress


def children(pid: int | None = None) -> set[int]:
    """Return the process ids of the children of `pid` (default: this process); none where the kernel does not say."""
    found: set[int] = set()
    process = "self" if pid is None else str(pid)
    with suppress(OSError):
        # A child stands under the thread that made it.
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError), open(f"/proc/{process}/task/{thread}/children") as file:
                found |= {int(child) for child in file.read().split()}
    return found


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all its descendants so far, those that have ended among them.

    A descendant that its parent left to the system (a daemon), or whose end nobody waited for, is not counted.
    """
    own = os.times()
    ticks = os.sysconf("SC_CLK_TCK")
    return sum(own[:4]) + sum(_ticks(pid) for pid in descendants()) / ticks


def descendants(pid: int | None = None) -> Iterator[int]:
    """Yield the process ids of all descendants of `pid` (default: this process), parents before children."""
    generation = children(pid)
    while generation:
        yield from generation
        generation = set().union(*(children(pid) for pid in generation))


def _ticks(pid: int) -> int:
    """The clock ticks of one process and of those of its children that it has waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return sum(int(field) for field in fields[11:15])
