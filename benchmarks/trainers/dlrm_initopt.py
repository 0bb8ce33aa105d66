"""The trainer of `dlrm_stock`, made of the same pieces, started by initopt's TorchRec plugin.

    torchrun --standalone --nproc-per-node 2 benchmarks/trainers/dlrm_initopt.py --profile cluster

Each rank prints one JSON line: its losses and the digest of all it trained, which equal those of `dlrm_stock`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # a script's own folder is on the path, the repository is not

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.trainers import criteo, dlrm_model, emulation
from benchmarks.trainers.trained_state import trained_state
from initopt import Compile, Recorder
from initopt.plugins.torchrec import Place, TrainerStartup, trainer


def startup(config: dlrm_model.Config, labels: tuple[str, ...] = (), *, shared_store: bool = False) -> TrainerStartup:
    """The trainer's start-up: the factories of `dlrm_model`, in the order that their parameters ask for."""
    # initopt compiles the parts itself, so that it can warm them up.
    uncompiled = replace(config, compile=False)

    def model(place: Place) -> nn.Module:
        return dlrm_model.make_model(uncompiled, place.device)

    def sharders() -> list[Any]:
        return dlrm_model.make_sharders(config)

    def planner(place: Place) -> Any:
        return dlrm_model.make_planner(config, place.device, place.world_size, place.local_world_size)

    def loader(place: Place) -> Any:
        return dlrm_model.make_loader(config, place.rank, place.world_size)

    def parts(model: nn.Module) -> Mapping[str, nn.Module]:
        return dict(zip(("dense", "interaction", "over"), dlrm_model.compiled_parts(model.model), strict=True))

    def batch(device: torch.device) -> criteo.Batch:
        return criteo.example(config.batch_size)

    return trainer(
        model=model,
        loader=loader,
        dense_optimizer=dlrm_model.dense_optimizer,
        sharders=sharders,
        planner=planner,
        compile=Compile(parts, batch=batch, dynamic=False, shared=shared_store) if config.compile else None,
        device="cpu",
        name="dlrm",
        labels=labels,
    )


def train(config: dlrm_model.Config, *, overlap: bool, shared_store: bool = False) -> dict[str, object]:
    """Start, train `config.steps` steps and say what came out. Expects the environment that torchrun sets."""
    labels = (f"profile: {config.profile}", *emulation.install(config.profile))
    torch.manual_seed(config.seed)
    with Recorder("dlrm", mode="overlap" if overlap else "serial", labels=labels) as recorder:
        ready = startup(config, labels, shared_store=shared_store).run(overlap=overlap, recorder=recorder)
        outputs = [ready.pipeline.progress(ready.batches) for _ in range(config.steps)]
        losses = [loss for loss, _, _ in outputs]
        digest = trained_state(ready.model, ready.optimizer, losses)
        recorder.digest("trained_state", digest, steps=config.steps)
    dist.destroy_process_group()
    return {"rank": int(os.environ["RANK"]), "losses": [loss.item() for loss in losses], "trained_state": digest}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    dlrm_model.add_arguments(arguments)
    arguments.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    arguments.add_argument(
        "--shared-store", action="store_true", help="say that all hosts see the same store of compiled code"
    )
    chosen = arguments.parse_args()
    print(
        json.dumps(train(dlrm_model.config_from(chosen), overlap=chosen.overlap, shared_store=chosen.shared_store)),
        flush=True,
    )


if __name__ == "__main__":
    main()
