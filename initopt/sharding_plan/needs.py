"""What a plan needs on each rank, in memory, as TorchRec's own storage estimator sees it.

The figures are estimates of the tables with their optimizer states and buffers; dense parameters are not in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.constants import BATCH_SIZE, POOLING_FACTOR
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.distributed.planner.utils import build_sharder_data_map, sharder_name

from initopt.sharding_plan.planned import Planned


@dataclass(frozen=True)
class Need:
    """What the tables of one rank need, in bytes."""

    rank: int
    hbm: int
    ddr: int
    ssd: int


def needs_of_ranks(
    planned: Sequence[Planned],
    topology: Topology,
    *,
    batch_size: int | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> list[Need]:
    """Return what each rank of `topology` needs for the planned tables, in order of ranks.

    `batch_size` (samples a rank; default: TorchRec's) and `constraints` are those that the planner was given.
    """
    options = [_option(one, topology, batch_size or BATCH_SIZE, constraints or {}) for one in planned]
    modules = {id(one.shardable): one.shardable for one in planned}.values()
    sharders = {sharder_name(type(shardable.module)): shardable.sharder for shardable in modules}
    EmbeddingStorageEstimator(topology=topology, constraints=constraints).estimate(
        options, sharder_data_map=build_sharder_data_map(sharders)
    )
    totals = [[0, 0, 0] for _ in range(topology.world_size)]
    for option in options:
        for shard in option.shards:
            total, storage = totals[shard.rank], shard.storage
            total[0] += storage.hbm
            total[1] += storage.ddr
            total[2] += storage.ssd
    return [Need(rank, *total) for rank, total in enumerate(totals)]


def _option(
    one: Planned, topology: Topology, batch_size: int, constraints: Mapping[str, ParameterConstraints]
) -> ShardingOption:
    given = constraints.get(one.table.name)
    sharding = one.sharding
    if one.kind == "data_parallel":
        whole = [one.table.rows, one.table.dim]
        shards = [Shard(size=whole, offset=[0, 0], rank=rank) for rank in range(topology.world_size)]
    else:
        shards = [Shard(size=s.shard_sizes, offset=s.shard_offsets, rank=s.placement.rank()) for s in one.shards]
    return ShardingOption(
        name=one.table.name,
        tensor=one.shardable.parameters[one.table.name],
        module=(one.shardable.path, one.shardable.module),
        input_lengths=given.pooling_factors if given else [POOLING_FACTOR],
        batch_size=batch_size,
        sharding_type=one.kind,
        partition_by=get_partition_by_type(one.kind),
        compute_kernel=one.kernel,
        shards=shards,
        cache_params=sharding.cache_params,
        enforce_hbm=sharding.enforce_hbm,
        is_pooled=ShardingOption.module_pooled(one.shardable.module, one.shardable.path),
        feature_names=given.feature_names if given else None,
        output_dtype=sharding.output_dtype,
        key_value_params=sharding.key_value_params,
        stash_weights=one.shardable.says(one.table.name, "stash_weights"),
    )


def gigabytes(amount: float) -> str:
    """Bytes as every view and message prints them: `1.5 GB`, `0.0 GB` (1 GB = 1024^3 bytes, as TorchRec has it).

    >>> gigabytes(80 * 1024**3)
    '80.0 GB'
    """
    return f"{amount / 1024**3:.1f} GB"
