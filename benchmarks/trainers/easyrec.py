"""A plain trainer with the structure of TorchEasyRec: a program that imports much, and forks its readers early.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.trainers.easyrec --model-dir FOLDER
    torchrun --standalone --nproc-per-node 2 -m benchmarks.trainers.easyrec --model-dir FOLDER --continue

What it imports and never uses stands for the packages of such a project, emulated by large ones that are installed with
this repository. The loader workers of training and evaluation are forked before there is a model; the plan comes from
an enumerator of its own, DistributedModelParallel is made by a function of its own, the pipeline is a subclass, and
rank 0 writes into the model folder only once all ranks are there. It leaves a checkpoint. With `--continue` it takes a
training step that makes the optimizer's state, loads the checkpoint over all, and trains on.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

# Emulated: large packages that are never used here.
import dask.array  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import torch
import torch._inductor.compile_fx
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType
from torchrec.optim.keyed import KeyedOptimizer

from benchmarks.trainers import criteo, dlrm_model
from benchmarks.trainers.printed import losses_of, print_trained

WORKERS = 2
REPLICATED = 3


class Enumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """TorchRec's, with the options of each table in an order that no dictionary decides."""

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        return sorted(super().enumerate(module, sharders), key=lambda option: (option.name, option.sharding_type))


class Pipeline(TrainPipelineSparseDist):  # type: ignore[misc,type-arg]
    """TorchRec's, which counts its batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.taken = 0

    def progress(self, batches: Any) -> Any:
        self.taken += 1
        return super().progress(batches)


def make_plan(model: nn.Module, device: torch.device, batch_size: int) -> ShardingPlan:
    topology = Topology(
        world_size=dist.get_world_size(),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        compute_device=device.type,
    )
    replicated = ParameterConstraints(sharding_types=[ShardingType.DATA_PARALLEL.value])
    constraints = {f"t_{name}": replicated for name in criteo.FEATURES[:REPLICATED]}
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=Enumerator(topology=topology, batch_size=batch_size, constraints=constraints),
        proposer=[GreedyProposer(), UniformProposer()],
        constraints=constraints,
    )
    return planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)


def wrapped(model: nn.Module, device: torch.device, plan: ShardingPlan) -> DistributedModelParallel:
    return DistributedModelParallel(module=model, sharders=get_default_sharders(), device=device, plan=plan)


def gathered(files: list[str]) -> list[str]:
    """The input files of all ranks."""
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, files)
    return sorted({file for one in found for file in one})


def saved(dmp: nn.Module, optimizer: KeyedOptimizer) -> dict[str, Any]:
    return {"model": dmp.state_dict(), "optimizer": optimizer.state_dict()}


def train(config: dlrm_model.Config, model_dir: Path, goes_on: bool) -> None:
    device = torch.device("cpu")
    torch.manual_seed(config.seed)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    days = [str(criteo.generate(config.samples, config.seed + day)) for day in (0, 1)]
    loaders = [
        criteo.loader(
            Path(day),
            config.rows_per_table,
            rank=rank,
            world_size=world_size,
            batch_size=config.batch_size,
            workers=WORKERS,
            seed=config.seed,
        )
        for day in (gathered([file])[0] for file in days)
    ]
    batches, evaluated = (iter(loader) for loader in loaders)
    model = dlrm_model.make_model(config, device)
    plan = make_plan(model, device, config.batch_size)
    dmp = wrapped(model, device, plan)
    optimizer = dlrm_model.make_optimizer(dmp)
    dist.barrier()
    if rank == 0:
        model_dir.mkdir(parents=True, exist_ok=True)
        (model_dir / "train_config.json").write_text(json.dumps({"batch_size": config.batch_size}))
    if goes_on:
        Pipeline(dmp, optimizer, device, execute_all_batches=True).progress(iter([next(batches)]))
        state = saved(dmp, optimizer)
        checkpoint.load(state, checkpoint_id=str(model_dir / "checkpoint"))
        dmp.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    pipeline = Pipeline(dmp, optimizer, device, execute_all_batches=True)
    losses = losses_of(lambda: pipeline.progress(batches)[0], config.steps)
    if not goes_on:
        checkpoint.save(saved(dmp, optimizer), checkpoint_id=str(model_dir / "checkpoint"))
    print_trained(rank, dmp, optimizer, losses)
    evaluate(dmp, optimizer, device, evaluated)
    dist.destroy_process_group()


def evaluate(dmp: nn.Module, optimizer: KeyedOptimizer, device: torch.device, batches: Any) -> None:
    dmp.eval()
    pipeline = Pipeline(dmp, optimizer, device, execute_all_batches=True)
    with torch.no_grad():
        pipeline.progress(batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--continue", dest="goes_on", action="store_true")
    dlrm_model.add_arguments(parser, *dlrm_model.SIZES, "samples")
    parser.set_defaults(compile=False)
    chosen = parser.parse_args()
    train(dlrm_model.config_from(chosen), chosen.model_dir, chosen.goes_on)


if __name__ == "__main__":
    main()
