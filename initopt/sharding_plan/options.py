"""Sharding options whose shards are made when somebody looks at them.

TorchRec keeps an object for every shard of every option: a row-wise option of 1,024 ranks has 1,024 of them, of which
all but two have the same size, and so the same estimates. Here an option keeps one shard per distinct size, and how
many of them stand where. To the rest of TorchRec it is a `ShardingOption`; `plain` makes it one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy
from torchrec.distributed.planner.types import Perf, Shard, ShardingOption, Storage

Run = tuple[Any, Any, int]
"""Consecutive shards with the same estimates: their `Perf`, their `Storage`, their number."""


class Layout:
    """How a table is cut: shard i has the size ([rows, columns]) of the kind that its run names."""

    def __init__(self, sizes: Sequence[Sequence[int]], offsets: Sequence[Sequence[int]]) -> None:
        self.count = len(sizes)
        # Shards of one size may stand apart (grid sharding), so a run names its kind.
        kinds: dict[tuple[int, ...], int] = {}
        self.runs: list[tuple[int, int]] = []
        start = 0
        for i, size in enumerate(sizes, 1):
            if i == self.count or sizes[i] != size:
                self.runs.append((kinds.setdefault(tuple(size), len(kinds)), i - start))
                start = i
        self.kinds = [Shard(size=list(size), offset=[0] * len(size)) for size in kinds]
        """One shard per distinct size, without estimates."""
        # An array: lists of offsets would take a gigabyte for thousands of tables on a thousand ranks.
        self._offsets = numpy.asarray(offsets)

    def shards(self, kinds: Sequence[Any]) -> list[Any]:
        """Return every shard, with the estimates of its kind and no rank."""
        owners = itertools.chain.from_iterable(itertools.repeat(kinds[kind], count) for kind, count in self.runs)
        return [
            Shard(size=list(kind.size), offset=offset, storage=kind.storage, perf=kind.perf)
            for kind, offset in zip(owners, self._offsets.tolist(), strict=True)
        ]


class LazyOption(ShardingOption):  # type: ignore[misc]
    """A sharding option that is made from a `Layout` and makes its shards when they are asked for.

    From then on the shards count, as they may have been changed.
    """

    _layout: Layout | None = None
    # Never changed in place, so copies of an option share them.
    _kinds: list[Any]
    _shards: list[Any] | None = None

    @property
    def shards(self) -> list[Any]:
        """The shards of the option; one per distinct size while `compact` holds."""
        if self._shards is None:
            assert self._layout is not None
            self._shards = self._layout.shards(self._kinds)
        return self._shards

    @shards.setter
    def shards(self, value: list[Any]) -> None:
        if len(value) == 1 and isinstance(value[0], Layout):
            self._layout, self._kinds = value[0], value[0].kinds
        else:
            self._layout, self._shards = None, value

    @property
    def lazy(self) -> bool:
        """Whether nobody has asked for the shards yet."""
        return self._shards is None

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return self._layout.count if self._layout is not None and self.lazy else len(self.shards)

    @property
    def total_storage(self) -> Any:
        """The sum of the shards' storage, in bytes."""
        if not self.lazy:
            return super().total_storage
        hbm = ddr = ssd = 0
        for _, storage, count in runs(self):
            hbm, ddr, ssd = hbm + count * storage.hbm, ddr + count * storage.ddr, ssd + count * storage.ssd
        return Storage(hbm=hbm, ddr=ddr, ssd=ssd)

    @property
    def total_perf(self) -> float:
        """The sum of the shards' perf, added one by one as TorchRec does: a product is rounded otherwise."""
        total: float = 0
        for perf, _, count in runs(self):
            one = perf.total
            for _ in range(count):
                total += one
        return total

    def __deepcopy__(self, memo: dict[int, Any] | None) -> LazyOption:
        twin = type(self).__new__(type(self))
        twin.__dict__ = _copied(self.__dict__, memo)
        return twin

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """A pickled option is an ordinary one: who reads it may not have initopt."""
        option = plain(self)
        return ShardingOption.__new__, (ShardingOption,), option.__dict__


class ProposedOption(ShardingOption):  # type: ignore[misc]
    """An ordinary option, estimated by TorchRec, of which `plan()` soon makes the deep copy that is the best plan.

    The copy is a `ShardingOption`, with everything of its own as if made by `copy.deepcopy`, but sooner.
    """

    def __deepcopy__(self, memo: dict[int, Any] | None) -> ShardingOption:
        twin = ShardingOption.__new__(ShardingOption)
        twin.__dict__ = state = _copied(self.__dict__, memo)
        state["shards"] = [
            Shard(s.size.copy(), s.offset.copy(), _own_storage(s.storage), _own_perf(s.perf), s.rank)
            for s in self.shards
        ]
        return twin


def _own_storage(storage: Any) -> Any:
    return Storage(storage.hbm, storage.ddr, storage.ssd)


def _own_perf(perf: Any) -> Any:
    return Perf(
        perf.fwd_compute,
        perf.fwd_comms,
        perf.bwd_compute,
        perf.bwd_comms,
        perf.input_dist_comms,
        perf.prefetch_compute,
    )


def _copied(state: dict[str, Any], memo: dict[int, Any] | None) -> dict[str, Any]:
    """Return a deep copy of the attributes of an option, but for those in `_SHARED`."""
    copied = state.copy()
    for name, value in state.items():
        if type(value) in _ATOMS or name in _SHARED:
            continue
        # Nearly all options have one list, of numbers.
        flat = type(value) is list and _ATOMS.issuperset(map(type, value))
        copied[name] = value.copy() if flat else deepcopy(value, memo)
    return copied


_SHARED = {"_tensor", "_module", "_layout", "_kinds", "shards"}
"""What TorchRec shares between an option and its copy, and what is copied apart."""
_ATOMS = {str, int, float, bool, type(None)}
_OURS = {"_layout", "_kinds", "_shards"}

# An error text may print an option: it reads as it does without initopt.
for _kind in (LazyOption, ProposedOption):
    _kind.__name__, _kind.__qualname__ = ShardingOption.__name__, ShardingOption.__qualname__
    _kind.__module__ = ShardingOption.__module__


def compact(options: Sequence[Any]) -> Callable[[], None]:
    """Let lazy options show one shard per distinct size, until the function that is returned is called."""
    shown = [option for option in options if isinstance(option, LazyOption) and option.lazy]
    for option in shown:
        # TorchRec replaces estimates and never changes them in place.
        option._kinds = option._shards = [Shard(k.size, k.offset, k.storage, k.perf) for k in option._kinds]

    def restore() -> None:
        for option in shown:
            option._shards = None

    return restore


def runs(option: Any) -> list[Run]:
    """Return the runs of an option's shards, without making them."""
    if isinstance(option, LazyOption) and option._shards is None:
        assert option._layout is not None
        kinds = option._kinds
        return [(kinds[kind].perf, kinds[kind].storage, count) for kind, count in option._layout.runs]
    alike = itertools.groupby(option.shards, key=lambda shard: (shard.perf, shard.storage))
    return [(perf, storage, sum(1 for _ in same)) for (perf, storage), same in alike]


def plain(option: Any, kind: Any = ShardingOption) -> Any:
    """Return an option of this `kind`, with shards of its own and no ranks; itself if it is no lazy one."""
    if not isinstance(option, LazyOption):
        return option
    twin = kind.__new__(kind)
    twin.__dict__.update((name, value) for name, value in option.__dict__.items() if name not in _OURS)
    if option.lazy and option._layout:
        twin.shards = option._layout.shards(option._kinds)
    else:
        twin.shards = [Shard(size=s.size, offset=s.offset, storage=s.storage, perf=s.perf) for s in option.shards]
    return twin
