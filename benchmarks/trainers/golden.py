"""A plain trainer with the structure of TorchRec's golden example: made batches, and DistributedModelParallel plans.

    torchrun --standalone --nproc-per-node 2 benchmarks/trainers/golden.py
    torchrun --standalone --nproc-per-node 2 benchmarks/trainers/golden.py --own-plan
    torchrun --standalone --nproc-per-node 2 benchmarks/trainers/golden.py --compile-dense

With `--own-plan` a planner runs before the optimizer of the tables is attached, and replicates three tables; with
`--compile-dense` the layers of the dense features are compiled at their first call. The batches come from the same
random numbers as the weights.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # a script's own folder is on the path, the repository is not

import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.trainers import criteo, dlrm_model
from benchmarks.trainers.printed import losses_of, print_trained

REPLICATED = 3


def made_batches(config: dlrm_model.Config) -> Iterator[criteo.Batch]:
    """Batches without end, drawn from the default generator when they are asked for."""
    count = config.batch_size
    while True:
        ids = torch.cat([torch.randint(rows, (count,)) for rows in config.rows_per_table])
        features = KeyedJaggedTensor(
            keys=list(criteo.FEATURES), values=ids, lengths=torch.ones(len(ids), dtype=torch.int32), stride=count
        )
        yield criteo.Batch(torch.rand(count, criteo.DENSE), features, torch.randint(2, (count,), dtype=torch.int32))


def train(config: dlrm_model.Config, own_plan: bool, compile_dense: bool) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    torch.manual_seed(config.seed)
    dist.init_process_group("gloo")
    model = dlrm_model.plain_model(config, device)
    if compile_dense:
        model.model.dense_arch.compile(dynamic=False)
    plan = None
    if own_plan:
        replicated = ParameterConstraints(sharding_types=[ShardingType.DATA_PARALLEL.value])
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=world_size, compute_device=device.type),
            constraints={f"t_{name}": replicated for name in criteo.FEATURES[:REPLICATED]},
        )
        plan = planner.collective_plan(model)
    dlrm_model.attach_optimizer(model)
    dmp = DistributedModelParallel(module=model, device=device, plan=plan)
    optimizer = dlrm_model.make_optimizer(dmp)
    pipeline = dlrm_model.make_pipeline(dmp, optimizer, device)
    batches = made_batches(config)
    losses = losses_of(lambda: pipeline.progress(batches)[0], config.steps)
    print_trained(rank, dmp, optimizer, losses)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own-plan", action="store_true")
    parser.add_argument("--compile-dense", action="store_true")
    dlrm_model.add_arguments(parser, *dlrm_model.SIZES)
    parser.set_defaults(compile=False)
    chosen = parser.parse_args()
    train(dlrm_model.config_from(chosen), chosen.own_plan, chosen.compile_dense)


if __name__ == "__main__":
    main()
