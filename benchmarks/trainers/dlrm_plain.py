"""The trainer of `dlrm_stock.py` without a word about initopt, as people have it: for `python -m initopt.run`.

torchrun --standalone --nproc-per-node 2 -m initopt.run benchmarks/trainers/dlrm_plain.py --profile local
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # a script's own folder is on the path, the repository is not

import torch
import torch.distributed as dist

from benchmarks.trainers import dlrm_model, emulation
from benchmarks.trainers.trained_state import trained_state


def train(config: dlrm_model.Config) -> dict[str, object]:
    """Start, train `config.steps` steps and say what came out. Expects the environment that torchrun sets."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    emulation.install(config.profile)
    device = torch.device("cpu")
    torch.manual_seed(config.seed)
    dist.init_process_group("gloo")
    model = dlrm_model.make_model(config, device)
    sharders = dlrm_model.make_sharders(config)
    planner = dlrm_model.make_planner(config, device, world_size, int(os.environ["LOCAL_WORLD_SIZE"]))
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    dmp = dlrm_model.make_dmp(model, device, plan, sharders)
    optimizer = dlrm_model.make_optimizer(dmp)
    batches = iter(dlrm_model.make_loader(config, rank, world_size))
    pipeline = dlrm_model.make_pipeline(dmp, optimizer, device)
    losses = [pipeline.progress(batches)[0] for _ in range(config.steps)]
    digest = trained_state(dmp, optimizer, losses)
    dist.destroy_process_group()
    return {"rank": rank, "losses": [loss.item() for loss in losses], "trained_state": digest}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    dlrm_model.add_arguments(arguments)
    print(json.dumps(train(dlrm_model.config_from(arguments.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
