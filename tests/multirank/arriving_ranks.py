"""Start-ups of two ranks that go wrong on one of them, in scripts that know nothing of initopt but its `step`."""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.multirank.optimized_ranks import hooked_now, watched

LATE = 3.0
"""Seconds that a rank is late: more than TIMEOUT, and than the others wait until they say so."""
TIMEOUT = 2.0
LONG = 40.0
"""Seconds: the timeout of the other groups, which nobody is to wait for."""


def outcome(call: Callable[[], Any]) -> str:
    """What a call came to, or failed with."""
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def failing(root: str, names: tuple[str, ...]) -> dict[str, Any]:
    """One rank after the other fails in a step, and both go on after it."""
    import torch
    from torch import distributed, nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import model_parallel
    from torchrec.distributed.model_parallel import get_default_sharders

    import initopt
    from initopt.optimize import together

    together.ALIKE = 1.0
    before = hooked_now()
    run = watched(root, names)
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=LONG))
    found: dict[str, Any] = {}

    # As in a trainer that logs on one rank.
    class Logged(model_parallel.DistributedModelParallel):  # type: ignore[misc]
        def __init__(self, *args: Any, failing: int, **kwargs: Any) -> None:
            if rank == failing:
                raise AttributeError("no strategy")
            super().__init__(*args, **kwargs)

    def untrained(rows: int = 64) -> nn.Module:
        tables = [
            EmbeddingBagConfig(name=f"t{at}", embedding_dim=8, num_embeddings=rows, feature_names=[f"f{at}"])
            for at in range(2)
        ]
        return nn.ModuleDict({"ebc": EmbeddingBagCollection(device=torch.device("meta"), tables=tables)})

    def made(failing: int, plan: Any = None) -> str:
        return type(Logged(untrained(), device=torch.device("cpu"), failing=failing, plan=plan)).__name__

    def alike() -> None:
        with initopt.step("alike"):
            raise ValueError(f"on rank {rank}")

    def optional() -> str:
        # An error that is caught, while the other rank waits elsewhere.
        if rank == 0:
            try:
                with initopt.step("optional"):
                    raise OSError("no cache")
            except OSError:
                time.sleep(1.0)
        distributed.barrier()
        return "met"

    def in_a_step() -> str:
        with initopt.step("outer"), initopt.step("inner"):
            if rank == 1:
                raise KeyError("x")
            distributed.broadcast(torch.zeros(1), src=1)
        return "took"

    def late() -> str:
        group = distributed.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
        if rank == 0:
            with initopt.step("features"):
                time.sleep(LATE)
        distributed.barrier(group)
        backend: Any = group._get_backend(torch.device("cpu"))
        return str(backend.options._timeout.total_seconds())

    def without_a_block(ranks: tuple[int, ...]) -> str:
        from initopt.comm_elim import elimination

        def fails(_: Any) -> Any:
            raise MemoryError("no room")

        real = elimination.eliminated
        elimination.eliminated = fails if rank in ranks else real
        try:
            return made(failing=-1)
        finally:
            elimination.eliminated = real

    found["alike"] = outcome(alike)
    found["optional"] = outcome(optional)
    found["constructor"] = outcome(lambda: made(failing=0))
    found["after it"] = outcome(optional)
    found["in a step"] = outcome(in_a_step)
    found["late"] = outcome(late)

    def misfit() -> str:
        from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=2, local_world_size=2, compute_device="cpu"),
            constraints={f"t{at}": ParameterConstraints(sharding_types=["table_wise"]) for at in range(2)},
        )
        return made(failing=-1, plan=planner.plan(untrained(rows=48), get_default_sharders()))

    found["misfit"] = outcome(misfit)
    found["no block on one"] = outcome(lambda: without_a_block((1,)))
    # A rank that began the same step anew at once would be taken for one that tries again.
    found["together again"] = outcome(lambda: distributed.barrier() or "met")
    found["no block"] = outcome(lambda: without_a_block((0, 1)))
    found["made"] = outcome(lambda: made(failing=-1))
    found["init"] = Logged.__init__.__code__.co_filename
    run._leave()
    now = hooked_now()
    found["left"] = [name for name in before if before[name] is not now[name]]
    found["init after"] = Logged.__init__.__code__.co_filename == __file__
    found["subclasses"] = "__init_subclass__" in vars(model_parallel.DistributedModelParallel)
    found["threads"] = [one.name for one in threading.enumerate() if one.name == "initopt-arrivals"]
    distributed.destroy_process_group()
    return found


def differing(kind: str, root: str, names: tuple[str, ...]) -> list[str]:
    """Ranks whose meetings differ: in the `order` of two groups, or as `members` make groups of their own only."""
    import torch
    from torch import distributed

    run = watched(root, names)
    rank = int(os.environ["RANK"])
    limit = datetime.timedelta(seconds=LONG)
    distributed.init_process_group("gloo", timeout=limit)
    groups = [distributed.new_group(timeout=limit) for _ in range(2)]

    def call() -> str:
        if kind == "members":
            distributed.new_group([rank], timeout=limit)
        else:
            for group in groups[:: 1 if rank else -1]:
                distributed.all_reduce(torch.zeros(1), group=group)
        return "went well"

    found = [outcome(call), outcome(lambda: distributed.barrier() or "met")]
    run._leave()
    return found


def ending(root: str, names: tuple[str, ...], how: str) -> str:
    """The script of rank 0 ends while the other one waits: by an exception, or killed."""
    from torch import distributed

    run = watched(root, names)
    store: Any = None
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=LONG))
    if os.environ["RANK"] != "0":
        found = outcome(lambda: distributed.barrier() or "met")
        store = distributed.distributed_c10d._get_default_store()
        store.set("over", "")
        run._leave()
        return found
    # This one serves the store, so the rank that ends is a process of its own only for the others.
    arrivals = run._optimizing.arrivals
    if how == "exception":
        arrivals.ends(MemoryError("no room"))
    else:
        arrivals._changed(process={**arrivals._status.process, "born": "before"})
    distributed.distributed_c10d._get_default_store().get("over")
    run._leave()
    return ""
