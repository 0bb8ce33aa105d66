"""Models with embedding tables on the meta device and TorchRec's own plans for them, for the tests about plans."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection

META = torch.device("meta")
KINDS = (
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_column_wise",
    "table_row_wise",
    "grid_shard",
)


class AnywhereSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Lists for the cpu what runs there: TorchRec lists fewer sharding types than it can run."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(KINDS)


SHARDERS: list[Any] = [AnywhereSharder(), *get_default_sharders()[1:]]


def bags(
    rows: int | Sequence[int] = (10, 10), dim: int = 8, *, weighted: bool = False, **config: Any
) -> EmbeddingBagCollection:
    """Tables `t0`, `t1`, ... with pooled features `f0`, `f1`, ..."""
    return EmbeddingBagCollection(
        device=META,
        is_weighted=weighted,
        tables=[
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=n, feature_names=[f"f{i}"], **config)
            for i, n in enumerate([rows] if isinstance(rows, int) else rows)
        ],
    )


def sequences(rows: Sequence[int] = (10, 10), dim: int = 8) -> EmbeddingCollection:
    """The same without pooling."""
    return EmbeddingCollection(
        device=META,
        tables=[
            EmbeddingConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=n, feature_names=[f"f{i}"])
            for i, n in enumerate(rows)
        ],
    )


def feature_processed(rows: Sequence[int] = (10, 10), dim: int = 8) -> FeatureProcessedEmbeddingBagCollection:
    """The pooled tables behind a feature processor."""
    processors = PositionWeightedModuleCollection({f"f{i}": 10 for i in range(len(rows))}, device=META)
    return FeatureProcessedEmbeddingBagCollection(bags(rows, dim, weighted=True), processors)


def managed_collisions(rows: int = 64, buckets: int = 8) -> ManagedCollisionEmbeddingBagCollection:
    """One table whose rows are divided by buckets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about TorchRec's own calls
        from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

        hashed = HashZchManagedCollisionModule(zch_size=rows, device=META, total_num_buckets=buckets)
    table = EmbeddingBagConfig(name="t0", embedding_dim=8, num_embeddings=rows, feature_names=["f0"])
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(device=META, tables=[table]), ManagedCollisionCollection({"t0": hashed}, [table])
    )


def model(module: nn.Module | None = None) -> nn.Module:
    """A model that keeps `module` (default: `bags()`) under the path `sparse.e`, beside a dense layer."""
    sparse = nn.ModuleDict({"e": bags() if module is None else module})
    return nn.ModuleDict({"sparse": sparse, "dense": nn.Linear(8, 1, device=META)})


def topology(world_size: int = 4, local_world_size: int = 2, device: str = "cuda", **options: Any) -> Topology:
    """A topology without its warning about how it was made."""
    logging.getLogger("torchrec.distributed.planner.types").setLevel(logging.ERROR)
    return Topology(world_size=world_size, local_world_size=local_world_size, compute_device=device, **options)


def constraints(tables: Iterable[str] = ("t0", "t1"), **options: Any) -> dict[str, ParameterConstraints]:
    """The same constraint for each of `tables`."""
    return {table: ParameterConstraints(**options) for table in tables}


def planner(on: Topology, limits: dict[str, ParameterConstraints] | None = None) -> EmbeddingShardingPlanner:
    """TorchRec's planner, without its report and with the reservation that it does not warn about."""
    return EmbeddingShardingPlanner(
        topology=on,
        constraints=limits,
        storage_reservation=FixedPercentageStorageReservation(0.15),
        stats=[],
        debug=False,
    )


def plan(module: nn.Module, kind: str, *, on: Topology | None = None, **options: Any) -> ShardingPlan:
    """TorchRec's plan for the tables `t0` and `t1` of `module`, both sharded as `kind`; 2 columns of 4 where split."""
    limits = constraints(sharding_types=[kind], min_partition=4, **options)
    return planner(on or topology(), limits).plan(module, SHARDERS)


def of(made: ShardingPlan, table: str = "t0", path: str = "sparse.e") -> ParameterSharding:
    """How `made` shards a table."""
    return made.plan[path][table]  # type: ignore[index]
