"""A rank that makes random sharding plans by itself and prints how each compares with TorchRec's `collective_plan`.

Every rank has a hash seed of its own.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings

HASH_SEED = str(17 * int(os.environ["RANK"]) + 1)
if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": HASH_SEED})

warnings.simplefilter("ignore")

from torch import distributed  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner  # noqa: E402

from initopt.sharding_plan import make_fast, plan_digest, plan_locally  # noqa: E402
from initopt.sharding_plan.together import OwnPlan  # noqa: E402
from tests.planner_fuzz import Generous, Inputs, Size, inputs_of  # noqa: E402

TINY = Size(tables=8, ranks=16, cells=96)


def inputs_like(seed: int) -> Inputs | None:
    try:
        inputs = inputs_of(seed, TINY)
    except (AssertionError, ValueError):
        return None
    # With parts of a user's own the other ranks wait for rank 0, which is another test.
    own = inputs.arguments.get("callbacks"), isinstance(inputs.arguments.get("storage_reservation"), Generous)
    return None if any(own) else inputs


def stock(seed: int) -> str:
    """The digest of TorchRec's collective plan, or the type of its error on rank 0, where the others would hang."""
    inputs = inputs_like(seed)
    assert inputs is not None
    said = [""]
    if distributed.get_rank() == 0:
        try:
            EmbeddingShardingPlanner(**inputs.arguments).plan(inputs.module, inputs.sharders)
        except Exception as error:
            said = [type(error).__name__]
    distributed.broadcast_object_list(said)
    if said[0]:
        return said[0]
    inputs = inputs_like(seed)
    assert inputs is not None
    planner = EmbeddingShardingPlanner(**inputs.arguments)
    return plan_digest(planner.collective_plan(inputs.module, inputs.sharders, distributed.group.WORLD))


def own(seed: int) -> str:
    """The digest of the plan that this rank makes, or the type of its error."""
    inputs = inputs_like(seed)
    assert inputs is not None
    planner = make_fast(EmbeddingShardingPlanner(**inputs.arguments))
    try:
        made: OwnPlan = plan_locally(planner, inputs.module, inputs.sharders, rank=distributed.get_rank())
    except Exception as error:
        return type(error).__name__
    if made.plan is None:
        return made.why.partition(":")[0]
    return plan_digest(made.plan)


def main() -> None:
    logging.disable(logging.CRITICAL)
    first, count = int(sys.argv[1]), int(sys.argv[2])
    distributed.init_process_group("gloo")
    results: dict[int, tuple[str, str]] = {}
    seed = first
    while len(results) < count:
        if inputs_like(seed) is not None:
            results[seed] = stock(seed), own(seed)
        seed += 1
    print(json.dumps([hash("a string"), results]), flush=True)


if __name__ == "__main__":
    main()
