"""TorchRec's two partitioners on arrays: which ranks the shards of a proposal go to, and how fast the plan would be.

The arithmetic is TorchRec's, addition by addition: a device adds up each part of its perf in the order in which shards
arrive, and its total is always made anew from the parts. Storage is whole bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy
from torchrec.distributed.planner.partitioners import SortBy
from torchrec.distributed.planner.types import PartitionByType
from torchrec.distributed.planner.utils import mb_to_bytes
from torchrec.distributed.types import ShardingType

from initopt.sharding_plan.ranks import DoesNotFit, Hosts, Queue, Ranks, TooSlow
from initopt.sharding_plan.space import LARGEST, Choice, Space, Unmodelled

SLACK = 1e-9
"""Relative slack of every comparison that stands for a comparison of two ratings.

A rating is a float sum of at most some ten thousand terms per rank, so two orders of adding differ by less than 1e-11.
"""

_CHECKPOINT = 32
"""So many uniform options lie between two stored states; all of them would take gigabytes for thousands of tables."""


Assignment = dict[int, list[int]]
"""The ranks of the shards of every option that is not uniform, by its index."""


class Greedy:
    """`GreedyPerfPartitioner` on a topology. Raises Unmodelled for a topology whose devices are not plain and empty."""

    def __init__(self, space: Space, topology: Any, sort_by: SortBy, balance_modules: bool) -> None:
        self._choices = space.choices
        self._by_perf, self._balance_modules = sort_by == SortBy.PERF, balance_modules
        self.world_size = _checked(topology)
        self._local_size = topology.local_world_size
        storages = [device.storage for device in topology.devices]
        self._capacity = [[s.hbm for s in storages], [s.ddr for s in storages], [s.ssd for s in storages]]
        self._room = numpy.array(self._capacity)
        size = topology.intra_group_size
        self._hosts = [range(i * size, (i + 1) * size) for i in range(self.world_size // size)]
        grid = PartitionByType.MULTI_HOST.value
        if not self._hosts and any(choice.partition_by == grid for choice in self._choices):
            raise Unmodelled("grid sharding on less than one host")
        self._columns: dict[int, list[tuple[slice, Any, Any]]] = {}
        # The states after the first 0, 32, 64, ... uniform options of the last proposal.
        self._before: list[int] = []
        self._states = [(numpy.zeros((5, self.world_size)), numpy.zeros((3, self.world_size), dtype=numpy.int64))]

    def never_fits(self, storage: tuple[int, int, int]) -> bool:
        """Whether shards of this many bytes in all are more than the devices hold together."""
        return any(
            min(capacity) >= 0 and needed > sum(capacity)
            for needed, capacity in zip(storage, self._capacity, strict=True)
        )

    def place(self, picks: list[int], limit: float, hbm: int = 0) -> tuple[Assignment, Ranks]:
        """Place a proposal.

        `limit` is a total that no rank may exceed, in the unit of perf; `hbm` replaces the HBM of every device, in
        bytes, unless it is 0. Raises DoesNotFit and TooSlow.
        """
        choices = self._choices
        ranks = self._uniform([pick for pick in picks if choices[pick].uniform], hbm)
        if max(ranks.totals) > limit:
            raise TooSlow
        assignment: Assignment = {}
        hosts = Hosts(self._hosts, ranks)
        queue = Queue(ranks, range(self.world_size), self._local_size)
        for pick in self._in_order(picks):
            choice = choices[pick]
            if choice.partition_by == _DEVICE:
                if choice.spread_by_column:
                    used = _one_shard_per_rank(choice, ranks, self._local_size)
                    queue.changed(used)
                else:
                    used = queue.place(choice, limit)
            else:
                used = (
                    _on_one_host(choice, ranks, hosts)
                    if choice.partition_by == _HOST
                    else _on_hosts(choice, ranks, hosts)
                )
                queue.changed(used)
                if max(ranks.totals[rank] for rank in used) > limit:
                    raise TooSlow
            hosts.changed(used)
            assignment[pick] = used
        return assignment, ranks

    def rate(self, picks: list[int], assignment: Assignment) -> float:
        """Return the largest sum of shard perf on a rank, added in the order of the proposal as the perf model does."""
        sums = numpy.zeros(self.world_size)
        for pick in picks:
            choice = self._choices[pick]
            if choice.uniform:
                for run in choice.runs:
                    sums[run.start : run.stop] += run.total
            else:
                shards = itertools.chain.from_iterable(itertools.repeat(run.total, run.shards) for run in choice.runs)
                for rank, total in zip(assignment[pick], shards, strict=True):
                    sums[rank] += total
        return float(sums.max())

    def _uniform(self, uniform: list[int], hbm: int) -> Ranks:
        same = 0
        while same < min(len(uniform), len(self._before)) and uniform[same] == self._before[same]:
            same += 1
        stored = min(same // _CHECKPOINT, len(self._states) - 1)
        del self._states[stored + 1 :]
        # Kept even if this proposal fails half-way: the states up to `stored` are those of both.
        self._before = uniform
        parts, used = (array.copy() for array in self._states[stored])
        for done, pick in enumerate(uniform[stored * _CHECKPOINT :], stored * _CHECKPOINT + 1):
            if self._choices[pick].shards != self.world_size:
                self._before = uniform[: done - 1]
                raise DoesNotFit
            for ranks, more_parts, more_used in self._columns_of(pick):
                parts[:, ranks] += more_parts
                used[:, ranks] += more_used
            if done % _CHECKPOINT == 0:
                self._states.append((parts.copy(), used.copy()))
        free = self._room - used
        if hbm:
            free[0] = hbm - used[0]
        # Storage is never negative, so if every option fits in the end then each did when it came.
        if uniform and free.min() < 0:
            raise DoesNotFit
        return Ranks(parts.tolist(), free.tolist())

    def _columns_of(self, pick: int) -> list[tuple[slice, Any, Any]]:
        if pick not in self._columns:
            self._columns[pick] = [
                (slice(run.start, run.stop), numpy.array(run.parts)[:, None], numpy.array(run.storage)[:, None])
                for run in self._choices[pick].runs
            ]
        return self._columns[pick]

    def _in_order(self, picks: list[int]) -> list[int]:
        """The options that are not uniform, largest first; of equal ones the one proposed first."""
        choices = self._choices
        others = [pick for pick in picks if not choices[pick].uniform]
        if self._by_perf:
            others.sort(key=lambda pick: choices[pick].perf, reverse=True)
        else:
            others.sort(key=lambda pick: choices[pick].storage, reverse=True)
        if self._balance_modules:
            tables: dict[str, int] = {}
            for pick in picks:
                tables[choices[pick].path] = tables.get(choices[pick].path, 0) + 1
            others.sort(key=lambda pick: -tables[choices[pick].path], reverse=True)
        return others


def _on_one_host(choice: Choice, ranks: Ranks, hosts: Hosts) -> list[int]:
    """Place all shards on the least loaded host that takes them."""
    for host in hosts.by_load():
        if choice.sharding_type == _TABLE_ROW_WISE:
            # TorchRec looks at the room of the host first, but where every shard has room so has their sum.
            if not _one_each_fits(choice, ranks, host):
                continue
            for run in choice.runs:
                ranks.put_each(run, host[run.start : run.stop])
            return list(host)
        room = [sum(free[host.start : host.stop]) for free in ranks.free]
        if any(needed > there for needed, there in zip(choice.storage, room, strict=True)):
            continue
        if choice.sharding_type != _TABLE_COLUMN_WISE:
            raise DoesNotFit
        before = ranks.saved(host)
        try:
            return Queue(ranks, host, len(host)).place(choice, math.inf)
        except DoesNotFit:
            ranks.restore(host, before)
    raise DoesNotFit


def _one_each_fits(choice: Choice, ranks: Ranks, targets: range) -> bool:
    """Whether shard i fits on target i; the targets differ, so no shard takes the room of another."""
    if choice.shards != len(targets):
        return False
    hbm_free, ddr_free, ssd_free = ranks.free
    for run in choice.runs:
        hbm, ddr, ssd = run.storage
        for target in targets[run.start : run.stop]:
            if hbm > hbm_free[target] or ddr > ddr_free[target] or ssd > ssd_free[target]:
                return False
    return True


def _on_hosts(choice: Choice, ranks: Ranks, hosts: Hosts) -> list[int]:
    """Place one shard per rank on as many hosts as it takes, consecutive in the order of their load."""
    order = hosts.by_load()
    needed, rest = divmod(choice.shards, len(order[0]))
    if rest or choice.sharding_type != _GRID_SHARD:
        raise DoesNotFit
    if needed >= len(order):
        windows = [[order[i % len(order)] for i in range(needed)]]
    else:
        windows = [order[i : i + needed] for i in range(len(order) - needed + 1)]
    for window in windows:
        before = [ranks.saved(host) for host in window]
        try:
            return _one_each(choice, ranks, list(itertools.chain.from_iterable(window)))
        except DoesNotFit:
            for host, state in zip(window, before, strict=True):
                ranks.restore(host, state)
    raise DoesNotFit


class MemoryBalanced:
    """`MemoryBalancedPartitioner` on a topology: of the plans that are hardly slower, the one with least HBM."""

    def __init__(self, space: Space, topology: Any, stock: Any) -> None:
        self.greedy = Greedy(space, topology, SortBy.PERF, stock._balance_modules)
        self._choices = space.choices
        self._hbm = [device.storage.hbm for device in topology.devices]
        self._tries, self._tolerance = stock._max_search_count, stock._tolerance

    def rate(self, picks: list[int]) -> float:
        """Return the rating of the plan that it ends with. Raises DoesNotFit."""
        unlimited = math.inf
        assignment, ranks = self.greedy.place(picks, unlimited)
        best = original = self.greedy.rate(picks, assignment)
        high = max(hbm - free for hbm, free in zip(self._hbm, ranks.free[0], strict=True))
        choices = [self._choices[pick] for pick in picks]
        required = sum(choice.storage[0] for choice in choices)
        low = max(int(required / self.greedy.world_size), max(choice.weight[0] for choice in choices))
        close = mb_to_bytes(10)
        for _ in range(self._tries):
            if not low + close < high:
                break
            middle = (high + low) // 2
            try:
                assignment, _ranks = self.greedy.place(picks, unlimited, middle)
                rating = self.greedy.rate(picks, assignment)
            except DoesNotFit:
                low = middle
                continue
            if rating > original * (1 + self._tolerance):
                low = middle
            else:
                best, high = rating, middle
        return best


def _checked(topology: Any) -> int:
    devices = topology.devices
    if [device.rank for device in devices] != list(range(topology.world_size)):
        raise Unmodelled("the topology's devices are not ranks 0 to world size - 1 in order")
    for device in devices:
        perf, storage = device.perf, device.storage
        if any((perf.fwd_compute, perf.fwd_comms, perf.bwd_compute, perf.bwd_comms, perf.prefetch_compute)):
            raise Unmodelled(f"rank {device.rank} of the topology has perf before anything is placed")
        if any(type(size) is not int or abs(size) >= LARGEST for size in (storage.hbm, storage.ddr, storage.ssd)):
            raise Unmodelled(f"rank {device.rank} of the topology has the storage {storage}")
    return len(devices)


def _one_each(choice: Choice, ranks: Ranks, targets: Sequence[int]) -> list[int]:
    """Place shard i on target i."""
    if choice.shards != len(targets):
        raise DoesNotFit
    for run in choice.runs:
        for target in targets[run.start : run.stop]:
            if not ranks.fits(run, target):
                raise DoesNotFit
            ranks.put(run, target)
    return list(targets)


def _one_shard_per_rank(choice: Choice, ranks: Ranks, local_size: int) -> list[int]:
    """Place each shard on the least loaded rank that has room and no other shard of this table."""
    used: list[int] = []
    for run in choice.runs:
        for _ in range(run.shards):
            left = set(range(len(ranks.totals))).difference(used)
            for rank in sorted(left, key=lambda rank: (ranks.totals[rank], rank % local_size, rank)):
                if ranks.fits(run, rank):
                    break
            else:
                raise DoesNotFit
            ranks.put(run, rank)
            used.append(rank)
    return used


_DEVICE, _HOST = PartitionByType.DEVICE.value, PartitionByType.HOST.value
_TABLE_ROW_WISE, _TABLE_COLUMN_WISE = ShardingType.TABLE_ROW_WISE.value, ShardingType.TABLE_COLUMN_WISE.value
_GRID_SHARD = ShardingType.GRID_SHARD.value
