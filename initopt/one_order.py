"""One order of meetings on all ranks, compared call by call through the job's store while they happen.

The first rank that comes to a call writes down what it is. One that comes with another call raises before it makes it,
and the others are told. torch itself pairs calls by their number only, so that ranks wait for each other until a
timeout, or take values of another call.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NoReturn

from initopt.agreement import Difference, Disagreement
from initopt.hooks import WORLD, Meeting, watched
from initopt.leaving import leave_collectives, sockets_now
from initopt.rank_numbers import ranks_in_short
from initopt.store_connection import own_connection

_LOOK = 0.2
"""Seconds between two looks for what another rank has found."""
_STAY = 2.0
"""Seconds that a rank leaves the others to read what was found before it raises: it may serve the store."""
_MAKES_GROUP = frozenset({"new_group", "split_group", "_new_group_with_tag"})

_turns = itertools.count()
"""The blocks and process groups of this process, each with keys of its own: a store keeps what was written."""


@contextmanager
def one_order() -> Iterator[None]:
    """Raise Disagreement on all ranks at the first meeting of the block that is not the same on all of them.

    All ranks enter such a block, for the time of a start-up: each call asks the store once more (0.2 ms for two ranks
    of one host: `benchmarks/bench_meetings.py`). Only calls of this thread are compared: their operation, group and
    root, and the ranks and backend that a new group is asked for. Ranks that wait in a call by then leave it: the
    connections that were made in the block are shut, so that its process groups are of no use after. Calls of other
    threads are left alone.
    """
    order = _Order()
    try:
        with watched(order):
            order.begin()
            yield
    finally:
        order.end()


class _Order:
    """Listens to the meetings of the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._sockets = sockets_now()
        self._calls = 0
        self._large = {WORLD}
        self._store: Any = None
        self._told: Difference | None = None
        self._over = threading.Event()

    def begin(self) -> None:
        """Compare from now on, if there is a process group; else from when it is made."""
        distributed = sys.modules["torch"].distributed
        if self._store is not None or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return
        from torch.distributed import PrefixStore, distributed_c10d

        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._rank, self._world = distributed.get_rank(), distributed.get_world_size()
        prefix = f"initopt/order/{attempt}/{next(_turns)}"
        job: Any = distributed_c10d._get_default_store()
        try:
            store, looked_at = (PrefixStore(prefix, own_connection(job)) for _ in range(2))
            store.compare_set("begun", "", "yes")
        except (AttributeError, RuntimeError, TimeoutError) as error:
            warnings.warn(
                f"initopt: one_order compares nothing, the job's store can't do it ({error}): leave the block out, or "
                "make the process group with a TCPStore",
                stacklevel=5,
            )
            return
        self._store = store
        threading.Thread(target=self._look, args=(looked_at,), name="initopt-order", daemon=True).start()

    def end(self) -> None:
        """Compare no more."""
        self._over.set()

    def begins(self, op: str, call_site: str) -> None:
        pass

    def enters(self, meeting: Meeting) -> None:
        """Compare a call before it is made. Raises Disagreement."""
        if threading.get_ident() != self._thread or self._store is None:
            return
        if self._told is not None:
            self._stop()
        makes_group = meeting.op in _MAKES_GROUP
        if makes_group and not meeting.ranks:
            # Its members alone make it.
            return
        if makes_group or meeting.group in self._large:
            self._calls += 1
            key, place = str(self._calls), f"meeting {self._calls} of all ranks"
        else:
            number = meeting.sequence
            key, place = f"{meeting.group}/{number}", f"meeting {number} on group {meeting.group}"
        mine = [_words(meeting), meeting.call_site, self._rank]
        first = json.loads(self._store.compare_set(key, "", json.dumps(mine)))
        if first[0] != mine[0]:
            found = sorted((first, mine), key=lambda one: one[2])
            told = [place, [one[2] for one in found], [f"{one[0]} at {one[1]}" for one in found]]
            self._told = _difference(json.loads(self._store.compare_set("differs", "", json.dumps(told))))
            self._stop()

    def around(self, meeting: Meeting, group: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def reads_payloads(self) -> bool:
        return False

    def met(self, meeting: Meeting) -> None:
        """Tell why, where a call failed since it was left. Raises Disagreement."""
        if threading.get_ident() != self._thread:
            return
        if meeting.op == "init_process_group" and not meeting.error:
            self.begin()
        elif meeting.op == "destroy_process_group" and meeting.group == WORLD:
            self._store, self._calls = None, 0
        if meeting.error and self._store is not None:
            # Another rank has left the call, perhaps: why was in the store before.
            with suppress(RuntimeError):
                self._hear(self._store)
            if self._told is not None:
                self._stop()

    def group_made(self, group: Any, name: str, call_site: str) -> None:
        pass

    def group_seen(self, name: str, ranks: tuple[int, ...]) -> None:
        if self._store is not None and len(ranks) == self._world:
            self._large.add(name)

    def spent(self, seconds: float) -> None:
        pass

    def _look(self, store: Any) -> None:
        """Wait for what another rank finds, and leave the call that this one is in."""
        try:
            while not self._hear(store):
                if self._over.wait(_LOOK):
                    return
            store.add("heard", 1)
        except RuntimeError:
            # The store is gone, and with it the job.
            return
        leave_collectives(self._sockets)

    def _hear(self, store: Any) -> bool:
        if self._told is None and store.check(["differs"]):
            self._told = _difference(json.loads(store.get("differs")))
        return self._told is not None

    def _stop(self) -> NoReturn:
        assert self._told is not None
        until = time.monotonic() + _STAY
        # Who serves the store may be gone by then, having heard.
        with suppress(RuntimeError):
            while self._store.add("heard", 0) < self._world and time.monotonic() < until:
                time.sleep(0.01)
        raise Disagreement([self._told])


def _words(meeting: Meeting) -> str:
    if meeting.op in _MAKES_GROUP:
        backend = meeting.options.partition(",")[0]
        return f"{meeting.op} for ranks {ranks_in_short(meeting.ranks)}, backend {backend}"
    root = f" from rank {meeting.root}" if meeting.root >= 0 else ""
    return f"{meeting.op}{root} on group {meeting.group}"


def _difference(told: list[Any]) -> Difference:
    place, ranks, texts = told
    return Difference(place, tuple((rank,) for rank in ranks), tuple(texts))
