"""What TorchRec's proposers propose, in their order, as indices into a `Space`.

Most of them ignore how their proposals fare, so the next one is known without placing the last. Those that listen say
so (`listens`) and must be told the outcome of each: the greedy proposer with a threshold, and the two that are too
intricate to be restated, of which a twin is driven.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer

from initopt.sharding_plan.space import Bytes, Choice, Space, Unmodelled, score


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a proposer is told: whether it could be partitioned, and how fast it would be."""

    plan: list[Any]
    rating: float | None

    @property
    def partitionable(self) -> bool:
        """Whether every shard found a rank."""
        return self.rating is not None


class Proposal(NamedTuple):
    """One option per table. Equal keys are equal sets of options.

    In units of perf: `total` of all shards, `largest` shard that is not uniform, `floor` that uniform options put on
    every rank.
    """

    key: Any
    total: int
    largest: int
    floor: int
    storage: Bytes
    picks: Callable[[], list[int]]


class Proposals(Protocol):
    """The proposals of one proposer."""

    listens: bool
    stock: Any
    topology: Any

    def __iter__(self) -> Iterator[Proposal]:
        """Yield them in order."""

    def hear(self, outcome: Outcome) -> None:
        """Take the outcome of the last one."""


def whole(space: Space, picks: Sequence[int]) -> Proposal:
    """Return the proposal of these options."""
    choices = [space.choices[pick] for pick in picks]
    return Proposal(
        key=sum(choice.mark for choice in choices),
        total=sum(choice.total for choice in choices),
        largest=max(choice.largest for choice in choices),
        floor=sum(choice.floor for choice in choices),
        storage=_summed(choices),
        picks=lambda: list(picks),
    )


def _summed(choices: Sequence[Choice]) -> Bytes:
    storages = [choice.storage for choice in choices]
    return sum(s[0] for s in storages), sum(s[1] for s in storages), sum(s[2] for s in storages)


def _sorted(space: Space, indices: list[int], use_depth: bool) -> list[int]:
    return sorted(indices, key=lambda index: score(space.choices[index], use_depth))


class _Deaf:
    listens = False
    stock: Any
    topology: Any = None

    def hear(self, outcome: Outcome) -> None:
        raise AssertionError("these proposals do not depend on outcomes")


class Grid(_Deaf):
    """Every combination, if there are few."""

    def __init__(self, stock: Any, space: Space) -> None:
        self.stock, self._space = stock, space

    def __iter__(self) -> Iterator[Proposal]:
        tables = self._space.tables.values()
        if math.prod(len(indices) for indices in tables) > self.stock._max_proposals:
            return
        for picks in itertools.product(*(_sorted(self._space, indices, True) for indices in tables)):
            yield whole(self._space, picks)


class Uniform(_Deaf):
    """One sharding type for all tables, each type that all of them have."""

    def __init__(self, stock: Any, space: Space) -> None:
        self.stock, self._space = stock, space

    def __iter__(self) -> Iterator[Proposal]:
        types: dict[str, dict[str, list[int]]] = {}
        for table, indices in self._space.tables.items():
            for index in indices:
                of_type = types.setdefault(self._space.choices[index].sharding_type, {})
                of_type.setdefault(table, []).append(index)
        for of_type in types.values():
            if of_type.keys() == self._space.tables.keys():
                use_depth = self.stock._use_depth
                yield whole(self._space, [_sorted(self._space, each, use_depth)[0] for each in of_type.values()])


class Greedy:
    """From every table's fastest option on, the table that takes most memory moves to its next one.

    The sums of a proposal are carried along: a step changes one table.
    """

    def __init__(self, stock: Any, space: Space) -> None:
        self.stock, self._space = copy.copy(stock), space
        self.listens = stock._threshold is not None
        self._stopped = False
        self.topology: Any = None

    def hear(self, outcome: Outcome) -> None:
        """Stop after `threshold` ratings in a row that are not the best; what did not fit does not count."""
        stock = self.stock
        if outcome.rating:
            stock._num_inferior_perf += 1
            if outcome.rating < stock._best_perf_rating:
                stock._best_perf_rating = outcome.rating
                stock._num_inferior_perf = 0
            self._stopped = stock._num_inferior_perf > stock._threshold

    def __iter__(self) -> Iterator[Proposal]:
        choices = self._space.choices
        ladders = [_sorted(self._space, indices, self.stock._use_depth) for indices in self._space.tables.values()]
        picks = [ladder[0] for ladder in ladders]
        steps = [0] * len(ladders)
        now = whole(self._space, picks)
        key, total, floor, (hbm, ddr, ssd) = now.key, now.total, now.floor, now.storage
        # The first table wins a tie, so the heap compares the table last.
        heaviest = [_heavy(choices[pick], table) for table, pick in enumerate(picks) if len(ladders[table]) > 1]
        heapq.heapify(heaviest)
        slowest = [(-choices[pick].largest, table, pick) for table, pick in enumerate(picks)]
        heapq.heapify(slowest)
        while True:
            while picks[slowest[0][1]] != slowest[0][2]:
                heapq.heappop(slowest)
            yield Proposal(key, total, -slowest[0][0], floor, (hbm, ddr, ssd), picks.copy)
            if self._stopped or not heaviest or not any(heaviest[0][:4]):
                return
            table = heaviest[0][4]
            old = choices[picks[table]]
            steps[table] += 1
            picks[table] = ladders[table][steps[table]]
            new = choices[picks[table]]
            key, total = key + new.mark - old.mark, total + new.total - old.total
            if new.uniform or old.uniform:
                floor += new.floor - old.floor
            before, after = old.storage, new.storage
            hbm, ddr, ssd = hbm + after[0] - before[0], ddr + after[1] - before[1], ssd + after[2] - before[2]
            heapq.heappush(slowest, (-new.largest, table, picks[table]))
            if steps[table] + 1 < len(ladders[table]):
                heapq.heapreplace(heaviest, _heavy(new, table))
            else:
                heapq.heappop(heaviest)


def _heavy(choice: Choice, table: int) -> tuple[int, int, int, int, int]:
    a, b, c, d = choice.weight
    return -a, -b, -c, -d, table


class Twin:
    """A proposer of TorchRec's that is driven with real outcomes, on a copy so that the original stays fresh.

    Raises Unmodelled where it fails: TorchRec's own search then fails in the same way.
    """

    listens = True

    def __init__(self, stock: Any, space: Space) -> None:
        self.stock, self._space = copy.copy(stock), space
        if isinstance(stock, EmbeddingOffloadScaleupProposer):
            self.stock.search = copy.deepcopy(stock.search)
        self._indices = {id(choice.option): index for index, choice in enumerate(space.choices)}
        self.topology: Any = None

    def load(self, search_space: list[Any], enumerator: Any) -> None:
        """Hand the search space to the twin."""
        self._ask(self.stock.load, search_space=search_space, enumerator=enumerator)

    def hear(self, outcome: Outcome) -> None:
        """Hand the outcome to the twin."""
        self._ask(
            self.stock.feedback,
            partitionable=outcome.partitionable,
            plan=outcome.plan,
            perf_rating=outcome.rating,
            storage_constraint=self.topology,
        )

    def __iter__(self) -> Iterator[Proposal]:
        while options := self._ask(self.stock.propose):
            for option in options:
                if id(option) not in self._indices:
                    self._indices[id(option)] = self._space.add(option)
            yield whole(self._space, [self._indices[id(option)] for option in options])

    def _ask(self, method: Callable[..., Any], **arguments: Any) -> Any:
        try:
            return method(**arguments)
        except Exception as error:
            raise Unmodelled(f"{type(self.stock).__name__} failed: {error!r}") from error
