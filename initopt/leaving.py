"""Leaving a start-up that failed: the collectives under way, the child processes, SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from initopt import process_tree

PATIENCE = 2.0
"""Seconds that killed children get to be gone."""


class Terminated(BaseException):
    """SIGTERM arrived during start-up."""


class Sigterm:
    """Raises Terminated in the main thread on SIGTERM, so that the start-up can say what it was doing."""

    def __init__(self) -> None:
        self._usable = threading.current_thread() is threading.main_thread()
        self._before = signal.getsignal(signal.SIGTERM)
        # Whoever handles or ignores SIGTERM himself goes on to do so.
        self._usable = self._usable and self._before is signal.SIG_DFL

    def raised(self) -> AbstractContextManager[None]:
        """Raise in this block."""
        return self._handling(self._stop, after=self._before)

    def as_before(self) -> AbstractContextManager[None]:
        """Put the handler back while children are forked, which would inherit ours."""
        return self._handling(self._before, after=self._stop)

    @contextmanager
    def _handling(self, handler: Any, *, after: Any) -> Iterator[None]:
        if not self._usable:
            yield
            return
        signal.signal(signal.SIGTERM, handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, after)

    def _stop(self, _signal: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
        raise Terminated


def joined_distributed() -> Any:
    """torch.distributed if this process has joined a group, without importing it."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    # torch can be built without it, and a thread may see it half imported by another one.
    joined = getattr(distributed, "is_initialized", None)
    return distributed if joined is not None and joined() else None


def children_now() -> set[int]:
    """Return the process ids of this process's children."""
    import multiprocessing

    known = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    return process_tree.children() | known


def end_children(pids: set[int]) -> None:
    """Kill these children and wait until they are gone."""
    # A DataLoader answers the death of a worker with an error of its own, raised wherever the main thread is by then.
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if in_main and pids else None
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + PATIENCE
    while pids & children_now() and time.monotonic() < until:
        time.sleep(0.01)
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)


def sockets_now() -> set[int]:
    """Return the file descriptors of this process's sockets."""
    found = set()
    try:
        for entry in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                    found.add(int(entry))
            except OSError:
                continue
    except OSError:
        return found
    return found


def leave_collectives(before: set[int]) -> None:
    """Make the collectives that are under way return with an error.

    NCCL groups can be aborted. Gloo (torch 2.13) has an `abort` that leaves its waiting calls waiting, so the
    connections that this start-up opened are shut instead, except those to the store, which still carries the reason
    to the others.
    """
    distributed = joined_distributed()
    if distributed is None:
        return
    world = distributed.distributed_c10d._world
    for group in list(world.pg_map):
        try:
            if "nccl" in distributed.get_backend(group):
                group.abort()
        except Exception:
            # The group may be half made; the others still have to be left.
            continue
    store_port = int(os.environ.get("MASTER_PORT", "0"))
    for descriptor in sockets_now() - before:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if internet and store_port not in (connection.getpeername()[1], connection.getsockname()[1]):
                    connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError, TypeError):
            # Listening sockets and ones that closed meanwhile have no peer.
            continue
