"""Start-ups of stock TorchRec that are recorded, on one rank of several: one per kind of module and sharding."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def sharded(root: Path, module: str, shardings: tuple[str, ...], seeds: str = "equal") -> None:
    """Record the start-up of one DistributedModelParallel; the default planner's collective hands the plan out."""
    import logging
    import warnings

    import torch
    from torch import distributed as dist
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    import initopt

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with initopt.Recorder("dlrm", mode="stock", root=root) as recorder, recorder.collectives():
        with initopt.step("process_group"):
            dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank() if seeds == "rank" else 0)
        with initopt.step("model"):
            model, sharders, plan = _model(module, shardings)

        class Planner(EmbeddingShardingPlanner):  # type: ignore[misc]
            def plan(self, module: Any, sharders: Any) -> Any:
                return plan

        topology = Topology(world_size=dist.get_world_size(), local_world_size=_local(), compute_device="cpu")
        with initopt.step("plan"):
            shared = Planner(topology=topology, debug=False).collective_plan(model, sharders, dist.group.WORLD)
        with initopt.step("shard"):
            DistributedModelParallel(model, device=torch.device("cpu"), plan=shared, sharders=sharders)
        with initopt.step("first_step"):
            dist.all_reduce(torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()


def _local() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


def _model(module: str, shardings: tuple[str, ...]) -> tuple[Any, list[Any], Any]:
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed import sharding_plan as made
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingPlan
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    world, meta = int(os.environ["WORLD_SIZE"]), torch.device("meta")
    config = EmbeddingConfig if module == "EC" else EmbeddingBagConfig
    tables = [
        config(name=f"t{i}", feature_names=[f"f{i}"], embedding_dim=8, num_embeddings=64 + 8 * i)
        for i in range(len(shardings))
    ]
    found: Any = (EmbeddingCollection if module == "EC" else EmbeddingBagCollection)(tables=tables, device=meta)
    sharder: Any = {
        "EC": EmbeddingCollectionSharder,
        "EBC": EmbeddingBagCollectionSharder,
        "MC": ManagedCollisionEmbeddingBagCollectionSharder,
    }[module]()
    if module == "MC":
        ids = {
            table.name: MCHManagedCollisionModule(
                zch_size=table.num_embeddings,
                device=meta,
                input_hash_size=1000,
                eviction_interval=2,
                eviction_policy=DistanceLFU_EvictionPolicy(),
            )
            for table in tables
        }
        found = ManagedCollisionEmbeddingBagCollection(found, ManagedCollisionCollection(ids, tables))
    how = {
        "row_wise": lambda i: made.row_wise(),
        "table_wise": lambda i: made.table_wise(rank=i % world),
        "table_row_wise": lambda i: made.table_row_wise(host_index=i % (world // _local())),
        "data_parallel": lambda i: made.data_parallel(),
    }
    placed = made.construct_module_sharding_plan(
        found,
        per_param_sharding={f"t{i}": how[kind](i) for i, kind in enumerate(shardings)},
        sharder=sharder,
        world_size=world,
        local_size=_local(),
        device_type="cpu",
    )
    model = torch.nn.ModuleDict({"tables": found, "over": torch.nn.Linear(8, 1)})
    return model, [sharder], ShardingPlan({"tables": placed})
