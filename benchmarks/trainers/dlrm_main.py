"""A plain trainer with the structure of DLRM's torchrec main, and of MLPerf's: three loaders before there is a model.

    torchrun --standalone --nproc-per-node 2 benchmarks/trainers/dlrm_main.py
    torchrun --standalone --nproc-per-node 2 benchmarks/trainers/dlrm_main.py --three-pipelines

Its own planner, topology and reservation; a module of its own folder; no end for its process group. The loaders of
validation and test are needed after training. With `--three-pipelines` each has a pipeline of its own over the one
model, and log lines stand between barriers, as MLPerf's rules want them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # a script's own folder is on the path, the repository is not

import torch
import torch.distributed as dist
from three_loaders import loaders  # of this file's own folder
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation

from benchmarks.trainers import criteo, dlrm_model
from benchmarks.trainers.printed import losses_of, print_trained


def log(rank: int, event: str) -> None:
    """A line of rank 0 that no rank may be ahead of."""
    dist.barrier()
    if rank == 0:
        print(f":::LOG {event}", flush=True)


def evaluate(dmp: DistributedModelParallel, pipeline: Any, loader: Iterable[criteo.Batch]) -> None:
    """Run the model over all batches of a loader."""
    dmp.eval()
    batches = iter(loader)
    with torch.no_grad():
        while True:
            try:
                pipeline.progress(batches)
            except StopIteration:
                break
    dmp.train()


def train(config: dlrm_model.Config, three_pipelines: bool) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    torch.manual_seed(config.seed)
    dist.init_process_group("gloo")
    training, validation, test = loaders(
        criteo.generate(config.samples, config.seed),
        config.rows_per_table,
        rank=rank,
        world_size=world_size,
        batch_size=config.batch_size,
    )
    model = dlrm_model.make_model(config, device)
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]), world_size=world_size, compute_device=device.type
        ),
        batch_size=config.batch_size,
        storage_reservation=HeuristicalStorageReservation(percentage=0.05),
    )
    sharders = get_default_sharders()
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    dmp = DistributedModelParallel(module=model, device=device, plan=plan)
    optimizer = dlrm_model.make_optimizer(dmp)
    pipelines = [dlrm_model.make_pipeline(dmp, optimizer, device) for _ in range(3 if three_pipelines else 1)]
    pipelines *= 1 if three_pipelines else 3
    if three_pipelines:
        for event in ("init_stop", "run_start", "epoch_start"):
            log(rank, event)
    batches = iter(training)
    losses = losses_of(lambda: pipelines[0].progress(batches)[0], config.steps)
    evaluate(dmp, pipelines[1], validation)
    evaluate(dmp, pipelines[2], test)
    print_trained(rank, dmp, optimizer, losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--three-pipelines", action="store_true")
    dlrm_model.add_arguments(parser, *dlrm_model.SIZES, "samples")
    parser.set_defaults(compile=False)
    chosen = parser.parse_args()
    train(dlrm_model.config_from(chosen), chosen.three_pipelines)


if __name__ == "__main__":
    main()
