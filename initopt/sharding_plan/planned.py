"""One table of a model and how a plan shards it: what both say, side by side.

It judges nothing (see `check`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.types import ParameterSharding, ShardingPlan

from initopt.sharding_plan.tables import Shardable, Table


@dataclass(frozen=True)
class Planned:
    """A `table` of the module `shardable`, and the plan's `sharding` of it."""

    shardable: Shardable
    table: Table
    sharding: ParameterSharding

    @property
    def kind(self) -> str:
        """The sharding type, such as `row_wise`."""
        kind: str = self.sharding.sharding_type
        return kind

    @property
    def kernel(self) -> str:
        """The compute kernel, such as `fused`."""
        kernel: str = self.sharding.compute_kernel
        return kernel

    @property
    def quantized(self) -> bool:
        """Whether the table is looked up by a kernel for inference."""
        return self.kernel.startswith("quant")

    @property
    def shards(self) -> list[Any]:
        """The ShardMetadata of the table, none for `data_parallel`."""
        return list(getattr(self.sharding.sharding_spec, "shards", None) or ())

    @property
    def ranks(self) -> list[int]:
        """Every rank that the plan names for the table, in `ranks` or in a placement."""
        placed = (shard.placement.rank() for shard in self.shards if shard.placement is not None)
        return [rank for rank in (*(self.sharding.ranks or ()), *placed) if rank is not None]

    @property
    def world_size(self) -> int | None:
        """How many ranks the plan was made for, where the sharding type tells."""
        if self.quantized:
            return None
        if self.kind == "row_wise":
            return len(self.shards) or None
        return len(self.sharding.ranks or ()) or None if self.kind == "data_parallel" else None

    @property
    def group_size(self) -> int | None:
        """How many ranks a host has that the plan was made for, where the sharding type tells."""
        if self.quantized:
            return None
        if self.kind == "table_row_wise":
            return len(self.shards) or None
        if self.kind == "grid_shard":
            return sum(shard.shard_offsets[1:] == [0] for shard in self.shards) or None
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of the table that the shards span."""
        corners = [[at + size for at, size in zip(s.shard_offsets, s.shard_sizes, strict=True)] for s in self.shards]
        return tuple(max(ends) for ends in zip(*corners, strict=True))


def planned_tables(plan: ShardingPlan, found: Iterable[Shardable]) -> Iterator[Planned]:
    """The tables that are in the model and in the plan."""
    for shardable in found:
        module_plan = plan.plan.get(shardable.path)
        if isinstance(module_plan, Mapping):
            for name, table in shardable.tables.items():
                if name in module_plan:
                    yield Planned(shardable, table, module_plan[name])
