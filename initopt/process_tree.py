"""This process and everything that it started: who is there, how to end it, and the CPU time that all have used."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
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


def kill(pids: Iterable[int], patience: float = 10.0) -> None:
    """Kill these processes, and wait until they have ended or `patience` seconds are over. Needs Linux.

    What this process has started itself is still to be waited for afterwards.
    """
    killed = []
    for pid in pids:
        with suppress(ProcessLookupError):
            killed.append(os.pidfd_open(pid))
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + patience
    for one in killed:
        # Not `select`, which a process with many files can't use.
        ended = select.poll()
        ended.register(one, select.POLLIN)
        ended.poll(max(until - time.monotonic(), 0.0) * 1000)
        os.close(one)


def _ticks(pid: int) -> int:
    """The clock ticks of one process and of those of its children that it has waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return sum(int(field) for field in fields[11:15])
