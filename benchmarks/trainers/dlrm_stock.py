"""The plain trainer, as people write it: every step after the one before. initopt only records its start-up.

    torchrun --standalone --nproc-per-node 2 benchmarks/trainers/dlrm_stock.py --profile cluster

Each rank prints one JSON line: its losses and the digest of all it trained.
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
from initopt.record import Recorder


def train(config: dlrm_model.Config) -> dict[str, object]:
    """Start, train `config.steps` steps and say what came out. Expects the environment that torchrun sets."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    labels = emulation.install(config.profile)

    with Recorder("dlrm", mode="stock", labels=(f"profile: {config.profile}", *labels)) as recorder:
        with recorder.collectives():
            with recorder.span("device_init", stage="device_init"):
                device = torch.device("cpu")
                torch.manual_seed(config.seed)
            with recorder.span("process_group", stage="process_group_init"):
                dist.init_process_group("gloo")
            with recorder.span("model", stage="train_module_creation"):
                model = dlrm_model.make_model(config, device)
                sharders = dlrm_model.make_sharders(config)
            with recorder.span("sharding_plan", stage="train_module_creation"):
                planner = dlrm_model.make_planner(config, device, world_size, int(os.environ["LOCAL_WORLD_SIZE"]))
                plan = planner.collective_plan(model, sharders, dist.group.WORLD)
            with recorder.span("dmp", stage="train_module_creation"):
                dmp = dlrm_model.make_dmp(model, device, plan, sharders)
            with recorder.span("optimizer", stage="train_module_creation"):
                optimizer = dlrm_model.make_optimizer(dmp)
            with recorder.span("loader", stage="preproc_creation"):
                batches = iter(dlrm_model.make_loader(config, rank, world_size))
            with recorder.span("pipeline", stage="pre_train"):
                pipeline = dlrm_model.make_pipeline(dmp, optimizer, device)
            with recorder.span("first_step", stage="get_first_batch_data"):
                outputs = [pipeline.progress(batches)]
        outputs += [pipeline.progress(batches) for _ in range(config.steps - 1)]

        losses = [loss for loss, _, _ in outputs]
        digest = trained_state(dmp, optimizer, losses)
        recorder.digest("trained_state", digest, steps=config.steps)

    dist.destroy_process_group()
    return {"rank": rank, "losses": [loss.item() for loss in losses], "trained_state": digest}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    dlrm_model.add_arguments(arguments)
    arguments.add_argument("--json-out", type=Path, default=None, help="also write the line to FILE.RANK")
    chosen = arguments.parse_args()
    line = json.dumps(train(dlrm_model.config_from(chosen)))
    print(line, flush=True)
    if chosen.json_out is not None:
        chosen.json_out.with_name(f"{chosen.json_out.name}.{os.environ['RANK']}").write_text(line + "\n")


if __name__ == "__main__":
    main()
