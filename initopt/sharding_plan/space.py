"""The search space as numbers: what an option costs, per run of equal shards, under an index.

Perf that only enters a lower bound is kept as an integer multiple of `1 / UNIT`, rounded down, so that sums over any
path are exact and order means nothing. Perf that enters a rating stays a float and is added in TorchRec's order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

from torchrec.distributed.planner.types import PartitionByType, Perf, Storage
from torchrec.distributed.types import ShardingType

from initopt.sharding_plan.options import runs

UNIT = 2**64
LARGEST = 2**62
"""Above this TorchRec sees no rating and no storage, and an array of 64-bit integers could overflow."""
_LARGEST_INT_PERF = 2**31
"""Integers up to here are added exactly as floats, however many shards there are."""

Bytes = tuple[int, int, int]
"""HBM, DDR and SSD."""


class Unmodelled(Exception):
    """The arrays can't stand for this input: TorchRec's own search has to run. Its text is the reason."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive equal shards.

    `parts` are what a device adds up: forward compute, backward compute, forward comms, backward comms, prefetch.
    """

    parts: tuple[float, float, float, float, float]
    total: float
    storage: Bytes
    count: int


@dataclass(frozen=True, slots=True)
class Choice:
    """An option as numbers. The scores are those by which the proposers sort; storage is the sum of all shards."""

    option: Any
    table: str
    path: str
    partition_by: str
    sharding_type: str
    runs: tuple[Run, ...]
    count: int
    storage: Bytes
    perf: float
    deepest: float
    weight: tuple[int, int, int, int]
    mark: int
    total: int
    largest: int
    floor: int
    spread_by_column: bool

    @property
    def uniform(self) -> bool:
        """Whether shard i goes to rank i."""
        return self.partition_by == PartitionByType.UNIFORM.value


def score(choice: Choice, use_depth: bool) -> float:
    """Return the perf by which a proposer sorts: of the slowest shard, or of all."""
    if use_depth:
        return choice.deepest
    totals: list[float] = []
    for run in choice.runs:
        totals += [run.total] * run.count
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
    if option.dependency is not None:
        raise Unmodelled(f"{option.fqn} is part of an embedding tower")
    if option.partition_by not in _PARTITIONS:
        raise Unmodelled(f"{option.fqn} is partitioned by {option.partition_by!r}")
    pieces = tuple(_run(*run, option) for run in runs(option))
    if not pieces:
        raise Unmodelled(f"{option.fqn} has an option without shards")
    hbm = sum(run.storage[0] * run.count for run in pieces)
    ddr = sum(run.storage[1] * run.count for run in pieces)
    ssd = sum(run.storage[2] * run.count for run in pieces)
    units = [int(run.total * UNIT) for run in pieces]
    uniform = option.partition_by == PartitionByType.UNIFORM.value
    perf: float = 0
    # Only options that a partitioner sorts have use for it.
    for run in () if uniform else pieces:
        for _ in range(run.count):
            perf += run.total
    return Choice(
        option=option,
        table=option.fqn,
        path=option.path,
        partition_by=option.partition_by,
        sharding_type=option.sharding_type,
        runs=pieces,
        count=sum(run.count for run in pieces),
        storage=(hbm, ddr, ssd),
        perf=perf,
        deepest=max(run.total for run in pieces),
        weight=(max(run.storage[0] for run in pieces), hbm, max(run.storage[1] for run in pieces), ddr),
        mark=mark,
        total=sum(unit * run.count for unit, run in zip(units, pieces, strict=True)),
        largest=0 if uniform else max(units),
        floor=min(units) if uniform else 0,
        spread_by_column=option.compute_kernel == "key_value"
        and option.sharding_type == ShardingType.COLUMN_WISE.value,
    )


_PARTITIONS = {each.value for each in PartitionByType}


def _run(perf: Any, storage: Any, count: int, option: Any) -> Run:
    if type(perf) is not Perf or type(storage) is not Storage:
        raise Unmodelled(f"{option.fqn} has estimates of a class that is not TorchRec's own")
    sizes = (storage.hbm, storage.ddr, storage.ssd)
    if any(type(size) is not int or not 0 <= size < LARGEST for size in sizes):
        raise Unmodelled(f"{option.fqn} needs storage of {storage}")
    parts = (perf.fwd_compute, perf.bwd_compute, perf.fwd_comms, perf.bwd_comms, perf.prefetch_compute)
    if not all(_sound(part) for part in parts):
        raise Unmodelled(f"{option.fqn} has the perf {perf}")
    return Run(parts, perf.total, sizes, count)


def _sound(part: Any) -> bool:
    if type(part) is int:
        return 0 <= part <= _LARGEST_INT_PERF
    return isinstance(part, float) and math.isfinite(part) and 0 <= part < LARGEST
