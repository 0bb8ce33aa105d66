"""A DLRM of Criteo shape and the pieces of its trainer, as factories that a plain script and initopt's plugin share.

Nothing here knows in which order the pieces are made: that is what the two trainers differ in.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.trainers import criteo, emulation

CRITEO_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
"""Rows of the 26 tables of Criteo 1TB as MLPerf's DLRM trains it (capped there at 40 million)."""

SHARDINGS = ("default", "table_wise", "column_wise", "row_wise", "data_parallel")


@dataclass(frozen=True)
class Config:
    """What a run trains. `rows` caps the rows of every table, `dim` is the embedding dimension (divisible by 8)."""

    rows: int = 20_000
    dim: int = 16
    batch_size: int = 256
    workers: int = 1
    steps: int = 5
    seed: int = 0
    sharding: str = "default"
    compile: bool = True
    samples: int = 65_536
    profile: str = "local"

    def __post_init__(self) -> None:
        if self.sharding not in SHARDINGS:
            raise ValueError(f"sharding {self.sharding!r} is none of {', '.join(SHARDINGS)}")
        if self.dim % 8:
            raise ValueError(f"dim={self.dim} is not divisible by 8, which a table cut into two columns needs")

    @property
    def rows_per_table(self) -> tuple[int, ...]:
        return tuple(min(rows, self.rows) for rows in CRITEO_ROWS)


SIZES = ("rows", "dim", "batch_size", "steps", "seed")
"""The fields that make sense to every trainer of this model."""


def add_arguments(parser: argparse.ArgumentParser, *names: str) -> None:
    """One option per field of `Config` (those of `names`, else all), with its default."""
    choices = {"sharding": SHARDINGS, "profile": emulation.PROFILES}
    for field in fields(Config):
        if names and field.name not in names:
            continue
        name = f"--{field.name.replace('_', '-')}"
        if field.name == "compile":
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        elif field.name in choices:
            parser.add_argument(name, choices=choices[field.name], default=field.default)
        else:
            parser.add_argument(name, type=int, default=field.default)


def config_from(arguments: argparse.Namespace) -> Config:
    """The configuration in the parsed options of `add_arguments`."""
    chosen = vars(arguments)
    return Config(**{field.name: chosen[field.name] for field in fields(Config) if field.name in chosen})


def make_model(config: Config, device: torch.device) -> DLRMTrain:
    """`plain_model` with the optimizer of its tables attached."""
    model = plain_model(config, device)
    attach_optimizer(model)
    return model


def plain_model(config: Config, device: torch.device) -> DLRMTrain:
    """The model with its tables on the meta device, and no optimizer yet.

    Draws the dense layers from the default generator. With `config.compile` the dense arch, the interaction and the
    over arch compile at their first call.
    """
    tables = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=config.dim, num_embeddings=rows, feature_names=[name])
            for name, rows in zip(criteo.FEATURES, config.rows_per_table, strict=True)
        ],
    )
    dlrm = DLRM(
        embedding_bag_collection=tables,
        dense_in_features=criteo.DENSE,
        dense_arch_layer_sizes=[512, 256, config.dim],
        over_arch_layer_sizes=[512, 512, 256, 1],
        dense_device=device,
    )
    if config.compile:
        for part in compiled_parts(dlrm):
            part.compile(dynamic=False)
    return DLRMTrain(dlrm)


def attach_optimizer(model: DLRMTrain) -> None:
    """From here on every table steps in its own backward pass."""
    tables = model.model.sparse_arch.embedding_bag_collection
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})


def compiled_parts(dlrm: DLRM) -> tuple[nn.Module, ...]:
    """The modules that `config.compile` compiles, in the order of a forward pass."""
    return dlrm.dense_arch, dlrm.inter_arch, dlrm.over_arch


class RowWiseOnCpu(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """The default sharder, which also offers row_wise where TorchRec offers it for accelerators only."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.ROW_WISE.value, *super().sharding_types(compute_device_type)]


def make_sharders(config: Config) -> list[ModuleSharder[nn.Module]]:
    if config.sharding == "row_wise":
        return [RowWiseOnCpu()]
    return get_default_sharders()  # type: ignore[no-any-return]


def make_planner(
    config: Config, device: torch.device, world_size: int, local_world_size: int
) -> EmbeddingShardingPlanner:
    """TorchRec's planner; `config.sharding` other than "default" is its only constraint."""
    constraints = None
    if config.sharding != "default":
        constraint = ParameterConstraints(
            sharding_types=[config.sharding],
            # The planner's own minimum is wider than these tables, and would leave each in one piece.
            min_partition=config.dim // 2 if config.sharding == "column_wise" else None,
        )
        constraints = {f"t_{name}": constraint for name in criteo.FEATURES}
    return EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=local_world_size, compute_device=device.type),
        constraints=constraints,
    )


def make_dmp(
    model: nn.Module, device: torch.device, plan: ShardingPlan, sharders: list[ModuleSharder[nn.Module]]
) -> DistributedModelParallel:
    return DistributedModelParallel(module=model, device=device, plan=plan, sharders=sharders)


def dense_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.005)


def make_optimizer(dmp: DistributedModelParallel) -> CombinedOptimizer:
    """The optimizer of all parameters: the tables' own, which steps in backward, and Adagrad for the rest."""
    dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(dmp.named_parameters())), dense_optimizer)
    return CombinedOptimizer([dmp.fused_optimizer, dense])


def make_loader(config: Config, rank: int, world_size: int) -> DataLoader[Any]:
    """This rank's loader over the day of `config`, which is written first if it isn't there."""
    return criteo.loader(
        criteo.generate(config.samples, config.seed),
        config.rows_per_table,
        rank=rank,
        world_size=world_size,
        batch_size=config.batch_size,
        workers=config.workers,
        seed=config.seed,
        worker_init=emulation.reader(config.profile),
    )


def make_pipeline(
    dmp: DistributedModelParallel, optimizer: CombinedOptimizer, device: torch.device
) -> TrainPipelineSparseDist[criteo.Batch, Any]:
    return TrainPipelineSparseDist(dmp, optimizer, device, execute_all_batches=True)
