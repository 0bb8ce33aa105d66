"""What the Python blocks of the pages take as given, small: a DLRM's factories and pieces, for one gloo rank.

    python -m tests.documented_pieces FILE

runs the blocks of a JSON list `[[place, code], ...]`, each in a namespace and a process group of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner

import initopt
from benchmarks.trainers import criteo, dlrm_model
from initopt.plugins.torchrec import Place, trainer

CONFIG = dlrm_model.Config(rows=10, dim=8, compile=False)
CPU = torch.device("cpu")


def make_model(place: Place) -> nn.Module:
    return dlrm_model.make_model(CONFIG, place.device)


def make_loader(place: Place) -> Iterable[criteo.Batch]:
    return [criteo.example(4)] * 4


def started() -> dict[str, Any]:
    """The names of a trainer that was started by hand."""
    dist.init_process_group("gloo")
    model, sharders = dlrm_model.make_model(CONFIG, CPU), dlrm_model.make_sharders(CONFIG)
    planner = dlrm_model.make_planner(CONFIG, CPU, 1, 1)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    given = {"module": model, "device": CPU, "plan": plan, "sharders": sharders}
    # What a script has before these lines.
    return {
        **given,
        "model": model,
        "process_group": dist.GroupMember.WORLD,
        "topology": planner._topology,
        "DistributedModelParallel": DistributedModelParallel,
        "EmbeddingShardingPlanner": EmbeddingShardingPlanner,
    }


def unstarted() -> dict[str, Any]:
    """The names of a trainer before its start: factories, and a pipeline that was made apart."""

    class Pipeline:
        def progress(self, batches: object) -> None:
            assert dist.is_initialized()

    given = {"model": make_model, "loader": make_loader, "dense_optimizer": dlrm_model.dense_optimizer}
    return {
        **{f"make_{name.rpartition('_')[2]}": factory for name, factory in given.items()},
        "given": given,
        "make_a_batch": lambda: criteo.example(4),
        "steps": 2,
        "pipeline": Pipeline(),
        "batches": [],
        "torch": torch,
        "trainer": trainer,
        "initopt": initopt,
    }


def namespace(code: str) -> Callable[[], dict[str, Any]]:
    return started if "DistributedModelParallel(" in code or "EmbeddingShardingPlanner(" in code else unstarted


def main() -> None:
    for place, code in json.loads(Path(sys.argv[1]).read_text()):
        # The other arguments, which the page leaves out.
        code = code.replace("trainer(\n    ...,", "trainer(\n    **given,")
        try:
            exec(compile(code, place, "exec"), namespace(code)())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        print(place)


if __name__ == "__main__":
    main()
