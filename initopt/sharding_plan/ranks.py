"""The ranks while a proposal is placed: what each holds, and in which order they are tried."""

from __future__ import annotations

import heapq
from typing import Any

from initopt.sharding_plan.space import Choice, Run


class DoesNotFit(Exception):
    """Some shard finds no rank, so the stock partitioner would raise a PlannerError."""


class TooSlow(Exception):
    """A rank is already slower than the best plan: there is no need to place the rest."""


class Ranks:
    """The devices while a proposal is placed: the parts of their perf, their totals, and what is free on them."""

    def __init__(self, parts: list[list[float]], free: list[list[int]]) -> None:
        self.parts, self.free = parts, free
        self.totals: list[float] = [
            fwd + bwd + fwd_comms + bwd_comms + prefetch
            for fwd, bwd, fwd_comms, bwd_comms, prefetch in zip(*parts, strict=True)
        ]

    def saved(self, ranks: range) -> list[list[Any]]:
        """Return the state of consecutive ranks."""
        return [each[ranks.start : ranks.stop] for each in self._lists()]

    def restore(self, ranks: range, saved: list[list[Any]]) -> None:
        """Set consecutive ranks to a state that was saved."""
        for each, before in zip(self._lists(), saved, strict=True):
            each[ranks.start : ranks.stop] = before

    def _lists(self) -> list[list[Any]]:
        return [*self.parts, *self.free, self.totals]

    def fits(self, run: Run, rank: int) -> bool:
        """Whether a shard of the run fits on the rank."""
        hbm, ddr, ssd = run.storage
        return hbm <= self.free[0][rank] and ddr <= self.free[1][rank] and ssd <= self.free[2][rank]

    def put(self, run: Run, rank: int) -> float:
        """Place a shard of the run; returns the new total of the rank."""
        hbm, ddr, ssd = run.storage
        self.free[0][rank] -= hbm
        self.free[1][rank] -= ddr
        self.free[2][rank] -= ssd
        fwd, bwd, fwd_comms, bwd_comms, prefetch = self.parts
        parts = run.parts
        fwd[rank] = a = fwd[rank] + parts[0]
        bwd[rank] = b = bwd[rank] + parts[1]
        fwd_comms[rank] = c = fwd_comms[rank] + parts[2]
        bwd_comms[rank] = d = bwd_comms[rank] + parts[3]
        prefetch[rank] = e = prefetch[rank] + parts[4]
        self.totals[rank] = total = a + b + c + d + e
        return total

    def put_each(self, run: Run, ranks: range) -> None:
        """Place one shard of the run on each of the ranks: `put`, with what is the same for all looked up once."""
        hbm, ddr, ssd = run.storage
        hbm_free, ddr_free, ssd_free = self.free
        more_fwd, more_bwd, more_fwd_comms, more_bwd_comms, more_prefetch = run.parts
        fwd, bwd, fwd_comms, bwd_comms, prefetch = self.parts
        totals = self.totals
        for rank in ranks:
            hbm_free[rank] -= hbm
            ddr_free[rank] -= ddr
            ssd_free[rank] -= ssd
            fwd[rank] = a = fwd[rank] + more_fwd
            bwd[rank] = b = bwd[rank] + more_bwd
            fwd_comms[rank] = c = fwd_comms[rank] + more_fwd_comms
            bwd_comms[rank] = d = bwd_comms[rank] + more_bwd_comms
            prefetch[rank] = e = prefetch[rank] + more_prefetch
            totals[rank] = a + b + c + d + e


class Hosts:
    """The hosts in the order of their load: the sum of the totals of their ranks, added in the order of ranks."""

    def __init__(self, hosts: list[range], ranks: Ranks) -> None:
        self._hosts, self._totals = hosts, ranks.totals
        self._loads = [0.0] * len(hosts)
        self._stale = set(range(len(hosts)))

    def changed(self, ranks: list[int]) -> None:
        """Note that these ranks hold something more."""
        if self._hosts:
            size = len(self._hosts[0])
            self._stale.update(rank // size for rank in ranks)

    def by_load(self) -> list[range]:
        """Return them, the least loaded first; of equal ones the first."""
        for host in self._stale:
            # Ranks beyond the last whole host belong to none.
            if host < len(self._hosts):
                load: float = 0
                for total in self._totals[self._hosts[host].start : self._hosts[host].stop]:
                    load += total
                self._loads[host] = load
        self._stale.clear()
        return [self._hosts[i] for i in sorted(range(len(self._loads)), key=self._loads.__getitem__)]


class Queue:
    """Some of the ranks, the least loaded first; of equal ones the first of a host, then the first of all.

    An entry is (total, rank within its host, rank). One with an old total is left behind and recognized when it comes
    up. A rank without room for a shard is set aside until a shard comes that may fit: in tight memory most are.
    """

    def __init__(self, ranks: Ranks, which: range, local_size: int) -> None:
        self._ranks, self._local_size = ranks, local_size
        self._heap = [(ranks.totals[rank], rank % local_size, rank) for rank in which]
        heapq.heapify(self._heap)
        self._aside: list[tuple[float, int, int]] = []
        self._most_room = -1
        self._changed: set[int] = set()

    def changed(self, used: list[int]) -> None:
        """Note that these ranks hold something that was not placed by this queue."""
        self._changed.update(used)

    def place(self, choice: Choice, limit: float) -> list[int]:
        """Place each shard on the least loaded rank that has room. Raises DoesNotFit and TooSlow."""
        used = []
        heap, ranks, totals = self._heap, self._ranks, self._ranks.totals
        for rank in self._changed:
            heapq.heappush(heap, (totals[rank], rank % self._local_size, rank))
        self._changed.clear()
        hbm_free, ddr_free, ssd_free = ranks.free
        for run in choice.runs:
            hbm, ddr, ssd = run.storage
            if hbm <= self._most_room:
                self._take_back(run)
            for _ in range(run.shards):
                while heap:
                    total, local, rank = heap[0]
                    if total != totals[rank]:
                        heapq.heappop(heap)
                    elif hbm <= hbm_free[rank] and ddr <= ddr_free[rank] and ssd <= ssd_free[rank]:
                        break
                    else:
                        self._aside.append(heapq.heappop(heap))
                        self._most_room = max(self._most_room, hbm_free[rank])
                else:
                    raise DoesNotFit
                total = ranks.put(run, rank)
                if total > limit:
                    raise TooSlow
                heapq.heapreplace(heap, (total, local, rank))
                used.append(rank)
        return used

    def _take_back(self, run: Run) -> None:
        aside, self._aside, self._most_room = self._aside, [], -1
        for entry in aside:
            if self._ranks.fits(run, entry[2]):
                heapq.heappush(self._heap, entry)
            elif entry[0] == self._ranks.totals[entry[2]]:
                self._aside.append(entry)
                self._most_room = max(self._most_room, self._ranks.free[0][entry[2]])
