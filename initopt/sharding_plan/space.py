"""The search space as numbers: what an option costs, per run of equal shards, under an index.

Perf that only enters a lower bound is kept as an integer multiple of `1 / UNIT`, rounded down, so that sums over any
path are exact and order means nothing. Perf that enters a rating stays a float and is added in TorchRec's order.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any, NamedTuple

from torchrec.distributed.planner.types import PartitionByType, Perf, Storage
from torchrec.distributed.types import ShardingType

from initopt.sharding_plan.options import runs

UNIT = 2.0**64
LARGEST = 2**62
"""Above this TorchRec sees no rating and no storage, and an array of 64-bit integers could overflow."""
_LARGEST_PERF = float(LARGEST)
_LARGEST_INT_PERF = 2**31
"""Integers up to here are added exactly as floats, however many shards there are."""

Bytes = tuple[int, int, int]
"""HBM, DDR and SSD."""


class Unmodelled(Exception):
    """The arrays can't stand for this input: TorchRec's own search has to run. Its text is the reason."""


class Run(NamedTuple):
    """Consecutive equal shards: numbers `start` to `stop` of their option.

    `parts` are what a device adds up: forward compute, backward compute, forward comms, backward comms, prefetch.
    """

    parts: tuple[float, float, float, float, float]
    total: float
    storage: Bytes
    start: int
    stop: int
    shards: int


class Choice(NamedTuple):
    """An option as numbers. The scores are those by which the proposers sort; storage is the sum of all shards."""

    option: Any
    uniform: bool
    """Whether shard i goes to rank i."""
    table: str
    path: str
    partition_by: str
    sharding_type: str
    runs: tuple[Run, ...]
    shards: int
    storage: Bytes
    perf: float
    deepest: float
    weight: tuple[int, int, int, int]
    mark: int
    total: int
    largest: int
    floor: int
    spread_by_column: bool


def score(choice: Choice, use_depth: bool) -> float:
    """Return the perf by which a proposer sorts: of the slowest shard, or of all."""
    if use_depth:
        return choice.deepest
    totals: list[float] = []
    for run in choice.runs:
        totals += [run.total] * run.shards
    # The builtin, as TorchRec calls it: from Python 3.12 on it rounds otherwise than a loop.
    return sum(totals)


class Space:
    """The options under their indices, and the tables in the order in which TorchRec meets them.

    Raises Unmodelled for an option whose numbers are not those of TorchRec's estimators.
    """

    def __init__(self, options: Iterable[Any]) -> None:
        self.choices: list[Choice] = []
        self.tables: dict[str, list[int]] = {}
        # A generator of its own: the trainer's draws are not ours to move.
        self._marks = Random(0)
        owners: dict[str, tuple[str, str]] = {}
        seen = set()
        for option in options:
            index = self.add(option)
            choice = self.choices[index]
            self.tables.setdefault(choice.table, []).append(index)
            owner = owners.setdefault(choice.table, (choice.path, option.name))
            key = choice.table, choice.sharding_type, option.compute_kernel
            if owner != (choice.path, option.name) or key in seen:
                raise Unmodelled(f"table {choice.table} has two options of one kind")
            seen.add(key)
        heaviest = (max(max(self.choices[index].storage) for index in each) for each in self.tables.values())
        if sum(heaviest) >= LARGEST:
            raise Unmodelled("all tables together may need more bytes than an array can count")

    def add(self, option: Any) -> int:
        """Add an option that belongs to no table's list and return its index."""
        choice = _choice(option, self._marks.getrandbits(128))
        self.choices.append(choice)
        return len(self.choices) - 1


def _choice(option: Any, mark: int) -> Choice:
    table, partition_by = option.fqn, option.partition_by
    if option.dependency is not None:
        raise Unmodelled(f"{table} is part of an embedding tower")
    if partition_by not in _PARTITIONS:
        raise Unmodelled(f"{table} is partitioned by {partition_by!r}")
    uniform = partition_by == _UNIFORM
    pieces: list[Run] = []
    shards = hbm = ddr = ssd = most_hbm = most_ddr = total = largest = floor = 0
    perf = deepest = 0.0
    for perf_of_each, storage_of_each, count in runs(option):
        run = _run(perf_of_each, storage_of_each, shards, count, table)
        pieces.append(run)
        each_hbm, each_ddr, each_ssd = run.storage
        hbm, ddr, ssd = hbm + each_hbm * count, ddr + each_ddr * count, ssd + each_ssd * count
        most_hbm, most_ddr = max(most_hbm, each_hbm), max(most_ddr, each_ddr)
        deepest = max(deepest, run.total)
        units = int(run.total * UNIT)
        total += units * count
        if uniform:
            floor = min(floor, units) if shards else units
        else:
            largest = max(largest, units)
            # Only options that a partitioner sorts have use for it.
            for _ in range(count):
                perf += run.total
        shards += count
    if not pieces:
        raise Unmodelled(f"{table} has an option without shards")
    sharding_type = option.sharding_type
    return Choice(
        option,
        uniform,
        table,
        option.path,
        partition_by,
        sharding_type,
        tuple(pieces),
        shards,
        (hbm, ddr, ssd),
        perf,
        deepest,
        (most_hbm, hbm, most_ddr, ddr),
        mark,
        total,
        largest,
        floor,
        spread_by_column=sharding_type == _COLUMN_WISE and option.compute_kernel == "key_value",
    )


# TorchRec's enumerations answer `.value` through a descriptor, which is slow for a question asked of every option.
_PARTITIONS = {each.value for each in PartitionByType}
_UNIFORM = PartitionByType.UNIFORM.value
_COLUMN_WISE = ShardingType.COLUMN_WISE.value


def _run(perf: Any, storage: Any, start: int, count: int, table: str) -> Run:
    if type(perf) is not Perf or type(storage) is not Storage:
        raise Unmodelled(f"{table} has estimates of a class that is not TorchRec's own")
    hbm, ddr, ssd = sizes = storage.hbm, storage.ddr, storage.ssd
    whole = type(hbm) is type(ddr) is type(ssd) is int
    if not (whole and 0 <= hbm < LARGEST and 0 <= ddr < LARGEST and 0 <= ssd < LARGEST):
        raise Unmodelled(f"{table} needs storage of {storage}")
    parts = perf.fwd_compute, perf.bwd_compute, perf.fwd_comms, perf.bwd_comms, perf.prefetch_compute
    for part in parts:
        # Not a number compares as false; a whole number is exact as a float up to far above this.
        if not (
            0.0 <= part < _LARGEST_PERF
            if isinstance(part, float)
            else type(part) is int and 0 <= part <= _LARGEST_INT_PERF
        ):
            raise Unmodelled(f"{table} has the perf {perf}")
    return Run(parts, perf.total, sizes, start, start + count, count)
