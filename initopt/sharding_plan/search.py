"""The search of TorchRec's planner without most of its work: the same best proposal, or the same failures.

`plan()` evaluates what its proposers propose, one by one. Here every proposal is looked at in the same order, but one
that can't beat the best so far is dropped by a lower bound, and the rest is placed on arrays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torchrec.distributed.planner.constants import MAX_SIZE
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, MemoryBalancedPartitioner
from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer

from initopt.sharding_plan.placement import SLACK, Greedy, MemoryBalanced
from initopt.sharding_plan.proposals import Outcome, Proposal, Proposals
from initopt.sharding_plan.ranks import DoesNotFit, TooSlow
from initopt.sharding_plan.space import UNIT, Bytes, Space, Unmodelled


@dataclass
class Counts:
    """How the proposals fared; each set of options counts once, as in TorchRec's log."""

    proposals: int = 0
    pruned: int = 0
    """Dropped by the bound."""
    cut: int = 0
    """Dropped while being placed: a rank was slower than the best plan."""
    placed: int = 0
    failed: int = 0
    timed_out: bool = False


@dataclass
class Found:
    """The result: the best proposal with its rating, or without one what TorchRec needs for its error."""

    counts: Counts = field(default_factory=Counts)
    best: list[int] | None = None
    rating: float = MAX_SIZE
    smallest: list[int] = field(default_factory=list)
    """The failed proposal with the least storage, the first of several."""
    last: list[int] = field(default_factory=list)
    """The last failed proposal."""


def bound(proposal: Proposal, world_size: int) -> int:
    """Return a lower bound of the rating of any placement of the proposal, in units.

    The rating is the largest sum of shard perf on a rank. It is at least the mean of these sums, which is the perf of
    all shards divided by the number of ranks. And some rank holds the slowest of the shards that may go anywhere; it
    also holds one shard of every uniform option, which is at least the fastest of that option.
    """
    return max(proposal.total // world_size, proposal.largest + proposal.floor)


def search(
    space: Space,
    sources: list[Proposals],
    partitioner: Any,
    topology: Any,
    timeout: float | None,
) -> Found:
    """Look at every proposal of the sources, in order, until `timeout` seconds have passed.

    Raises Unmodelled where the arrays can't stand for TorchRec's partitioner.
    """
    started = time.monotonic()
    placing = _Placing(space, partitioner, topology, exact=any(source.listens for source in sources))
    keys = _Keys(space, real=any(isinstance(source.stock, EmbeddingOffloadScaleupProposer) for source in sources))
    found = Found()
    counts = found.counts
    seen: dict[Any, Outcome | None] = {}
    ranks = placing.world_size
    least: Bytes = (MAX_SIZE, MAX_SIZE, MAX_SIZE)
    for source in sources:
        source.topology = topology
        for proposal in source:
            if timeout and seen and time.monotonic() - started > timeout:
                counts.timed_out = True
                return found
            key = keys.of(proposal) if keys.real else proposal.key
            if key not in seen:
                counts.proposals += 1
                seen[key] = None
                # A better plan has a rating below the best one, so its bound is below too, but for rounding.
                if bound(proposal, ranks) >= placing.limit:
                    counts.pruned += 1
                    continue
                rating = placing.rate(proposal, counts)
                if rating is not None and not rating < MAX_SIZE:
                    raise Unmodelled(f"a plan has the rating {rating}, above what TorchRec takes for one")
                if rating is not None and rating < found.rating:
                    found.best, found.rating = proposal.picks(), rating
                    placing.must_beat(rating)
                elif rating is None and found.best is None:
                    found.last = proposal.picks()
                    if proposal.storage < least:
                        least, found.smallest = proposal.storage, found.last
                if placing.exact:
                    seen[key] = Outcome([space.choices[pick].option for pick in proposal.picks()], rating)
            if source.listens:
                outcome = seen[key]
                assert outcome is not None
                source.hear(outcome)
    return found


class _Placing:
    """The rating of a proposal as far as it matters: exactly, or None if it fails or can't be the best.

    `limit` is what a bound must be below, in units: infinite while there is no plan, and always if ratings are wanted
    `exact`.
    """

    def __init__(self, space: Space, partitioner: Any, topology: Any, exact: bool) -> None:
        self.exact = exact
        self._best, self.limit = math.inf, math.inf
        self._balanced: MemoryBalanced | None = None
        if isinstance(partitioner, MemoryBalancedPartitioner):
            self._balanced = MemoryBalanced(space, topology, partitioner)
            self._greedy = self._balanced.greedy
        else:
            assert isinstance(partitioner, GreedyPerfPartitioner)
            self._greedy = Greedy(space, topology, partitioner._sort_by, partitioner._balance_modules)
        self.world_size = self._greedy.world_size

    def must_beat(self, rating: float) -> None:
        """Look for a better rating than this one from now on."""
        if not self.exact:
            self._best = rating * (1 + SLACK)
            self.limit = self._best * UNIT

    def rate(self, proposal: Proposal, counts: Counts) -> float | None:
        try:
            if self._greedy.never_fits(proposal.storage):
                raise DoesNotFit
            picks = proposal.picks()
            if self._balanced is not None:
                rating = self._balanced.rate(picks)
            else:
                assignment, _ = self._greedy.place(picks, self._best)
                rating = self._greedy.rate(picks, assignment)
        except DoesNotFit:
            counts.failed += 1
            return None
        except TooSlow:
            counts.cut += 1
            return None
        counts.placed += 1
        return rating


class _Keys:
    """What tells two proposals apart, as TorchRec does: by the hashes of their options.

    Options of the search space differ, so a number for each will do, of which the sum is cheap; 128 random bits make
    two sets of options with one sum less likely than a broken machine. Options that a proposer makes may be equal.
    """

    def __init__(self, space: Space, real: bool) -> None:
        self._space, self.real = space, real
        self._hashes: dict[int, int] = {}

    def of(self, proposal: Proposal) -> Any:
        picks = proposal.picks()
        for pick in picks:
            if pick not in self._hashes:
                self._hashes[pick] = hash(self._space.choices[pick].option)
        return tuple(sorted(self._hashes[pick] for pick in picks))


def handed_over(found: Found) -> Iterator[list[int]]:
    """Yield the proposals that bring `plan()` to the same result: the best, or those that its error tells of."""
    if found.best is not None:
        yield found.best
        return
    if found.smallest and found.smallest != found.last:
        yield found.smallest
    if found.last:
        yield found.last
